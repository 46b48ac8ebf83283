"""Arguments for vLLM's command line that a deployment file may give, and those that kvtier sets itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

MAX_ARGUMENTS = 256
MAX_ARGUMENT_CHARACTERS = 16 << 10
_SHOWN_CHARACTERS = 80

FIELDS = {
    "max_model_len": "--max-model-len",
    "max_num_requests": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "load_format": "--load-format",
    "revision": "--revision",
    "cache_dir": "--download-dir",
    "trust_remote_code": "--trust-remote-code",
}
"""Fields of a model that vLLM also has, and its names for them."""

_OWN = {
    "--model": "the model's field model says it",
    "--served-model-name": "the model's field name says it",
    "--uds": "kvtier chooses where an engine listens",
    "--host": "kvtier chooses where an engine listens",
    "--port": "kvtier chooses where an engine listens",
    "--grpc-port": "kvtier chooses where an engine listens",
    "--api-key": "http.api_keys says who may ask",
    "--root-path": "kvtier's HTTP server stands before it",
    "--ssl-keyfile": "http.tls_key says it",
    "--ssl-certfile": "http.tls_cert says it",
    "--ssl-ca-certs": "kvtier's HTTP server stands before it",
    "--ssl-cert-reqs": "kvtier's HTTP server stands before it",
    "--enable-ssl-refresh": "kvtier's HTTP server stands before it",
    "--kv-transfer-config": "kvtier's connector is set up by the model's field cache",
    "--config": "give its arguments here",
    "--headless": "an engine of a deployment answers requests itself",
    "--allowed-origins": "http.allow_origins says it",
    "--allow-credentials": "kvtier's HTTP server stands before it",
}
_SHORTEST_ABBREVIATION = len("--po")


def check_arguments(arguments: Sequence[str | int | float]) -> None:
    """Raises `ConfigError` with one sentence about the first argument that is not allowed here."""
    if len(arguments) > MAX_ARGUMENTS:
        raise ConfigError(f"vllm must not be more than {MAX_ARGUMENTS} arguments, but is {len(arguments)}")
    for argument in map(str, arguments):
        if len(argument) > MAX_ARGUMENT_CHARACTERS or "\0" in argument:
            raise ConfigError(f"each argument in vllm must be text of at most {MAX_ARGUMENT_CHARACTERS} characters")
        if argument.startswith("--"):
            _check_option(argument)


def option_of(argument: str) -> str:
    """The option that an argument such as `--max_model_len=5` names, in vLLM's spelling."""
    return argument.partition("=")[0].partition(".")[0].replace("_", "-")


def _check_option(argument: str) -> None:
    shown = printable(argument, _SHOWN_CHARACTERS)
    name = option_of(argument)
    if any(character.isspace() for character in name):
        first, _, rest = shown.partition(" ")
        raise ConfigError(f"vllm has {shown!r}, which is two arguments: write {first}={rest}, or one after the other")
    for own, why in _OWN.items():
        # vLLM accepts abbreviations of options.
        if name == own or (len(name) >= _SHORTEST_ABBREVIATION and own.startswith(name)):
            raise ConfigError(f"vllm must not have {shown}: {why}")
