"""`kvtier explain`: why a request, or a prompt, had no more hits in the cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import msgspec

from kvtier.blocks.full_identity import IdentityKind, identity_of_folder
from kvtier.blocks.namespace import NamespaceFields
from kvtier.cli.cluster_options import AskedClusterOptions, asked_cluster_options
from kvtier.cli.connection_options import ConnectionOptions, connection_options
from kvtier.cli.engine_socket import engine_socket
from kvtier.client.client import CacheClient
from kvtier.deploy.run.served_caches import does_answer, find_engines
from kvtier.engine.process.asking import ask_parting
from kvtier.errors import ConfigError, KvtierError
from kvtier.models.config import COMPUTE_DTYPES, ModelConfig, read_config
from kvtier.observe.printable import printable
from kvtier.stores.valkey.config import ClusterConfig, open_cluster
from kvtier.tiers.cluster_explaining import AskedCluster
from kvtier.tiers.explaining import explain, explain_request
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.parting import Parting

_TIMEOUT_S = 10.0
_LONGEST = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """A model as an engine would load it, as far as its blocks depend on that."""

    folder: Path
    load_format: Literal["auto", "dummy"]
    dtype: str
    quantization: Literal["fp8"] | None
    device: str
    block_size: int
    salt: str
    lora: str
    identity: IdentityKind = "sampled"

    def fields(self) -> NamespaceFields:
        """The namespace that the engine would derive, without loading the weights."""
        config = read_config(self.folder)
        dtype = config.dtype if self.dtype == "auto" else self.dtype
        is_dummy = self.load_format == "dummy"
        return NamespaceFields(
            layout=config.kv_layout(self.block_size, dtype),
            weights=_dummy_weights(config, dtype, self.device)
            if is_dummy
            else identity_of_folder(self.folder, self.identity),
            model_config=config.kv_identity(),
            quantization=self.quantization or ("gptq" if config.quantization else ""),
            compute_dtype=dtype,
            lora=self.lora,
            salt=self.salt,
        )


@click.command("explain", short_help="Say why a request or prompt had no more hits.")
@click.argument("request_id", required=False)
@connection_options
@asked_cluster_options
@click.option("--engine", default=None, help="An engine's socket, unix:PATH: ask only where the prompt diverged.")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), help="The model's folder, for a prompt.")
@click.option("--prompt", default=None, help="The prompt's text, as the engine got it.")
@click.option(
    "--prompt-file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A file with the prompt's text."
)
@click.option("--tokens", default=None, help="The prompt's token ids, as in 1,2,3.")
@click.option("--dtype", type=click.Choice(["auto", *COMPUTE_DTYPES]), default="auto", show_default=True)
@click.option("--quantization", type=click.Choice(["fp8"]), default=None, help="If the engine quantises the weights.")
@click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto", show_default=True)
@click.option("--device", default="auto", show_default=True, help="Where dummy weights were made: cuda or cpu.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens in a block.")
@click.option("--salt", default="", help="The engine's salt, if it has one.")
@click.option("--lora", default="", help="The identity of the adapter, if there is one.")
@click.option(
    "--identity",
    type=click.Choice(["sampled", "full"]),
    default="sampled",
    show_default=True,
    help="How the engine identifies its weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain_command(
    request_id: str | None,
    reach: ConnectionOptions,
    cluster: AskedClusterOptions,
    engine: str | None,
    model: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    tokens: str | None,
    dtype: str,
    quantization: Literal["fp8"] | None,
    load_format: Literal["auto", "dummy"],
    device: str,
    block_size: int,
    salt: str,
    lora: str,
    identity: IdentityKind,
    as_json: bool,
) -> None:
    """Say why REQUEST_ID, or a prompt, had no more hits in the cache.

    Without --server, it asks the running server of this user, alone or in a deployment. For a request that an engine
    has reported to the server, give its id:

        kvtier explain REQUEST_ID

    For a prompt's state in the server now, give the engine's own options:

        kvtier explain --model FOLDER --prompt "Once upon a time" --salt tenant

    The answer also says where the prompt diverged from earlier ones. For engines without a cache server it says only
    that: it asks the engines of this user's deployments, or the one at a socket:

        kvtier explain --engine unix:/run/kvtier/engine.sock REQUEST_ID

    If engines are right above a Valkey cluster, it tells a prompt's state there:

        kvtier explain --cluster tcp://127.0.0.1:6379 --model FOLDER --prompt "Once upon a time"
    """
    if engine is not None:
        _explain_by_engine(engine, request_id, as_json=as_json)
        return
    num_prompts = sum(given is not None for given in (prompt, prompt_file, tokens))
    if (request_id is None) == (model is None) or num_prompts != (model is not None):
        raise click.UsageError("Give a request id, or --model with one of --prompt, --prompt-file and --tokens.")
    ask: Callable[[CacheClient], Explanation | None]
    try:
        cluster_config = cluster.config()
        if model is None and cluster_config is not None:
            raise click.UsageError("A cluster has no notes of requests: give --model and a prompt.")
        if model is None:
            assert request_id is not None
            ask = functools.partial(explain_request, request_id=request_id)
        else:
            loaded = ModelOptions(
                folder=model,
                load_format=load_format,
                dtype=dtype,
                quantization=quantization,
                device=device,
                block_size=block_size,
                salt=salt,
                lora=lora,
                identity=identity,
            )
            token_ids = _token_ids(model, prompt, prompt_file, tokens)
            about = functools.partial(explain, fields=loaded.fields(), tokens=token_ids, model=model.resolve().name)
            if cluster_config is not None:
                _show(_explained_by_cluster(cluster_config, about), as_json=as_json)
                return
            ask = about
        if reach.server is None and not does_answer(reach.address) and _do_engines_tell(request_id, as_json=as_json):
            return
        with reach.connect(_TIMEOUT_S) as client:
            explanation = _with_parting(ask(client), reach.address)
    except (KvtierError, OSError) as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error
    if explanation is None and reach.server is None and _do_engines_tell(request_id, as_json=as_json):
        return
    if explanation is None:
        raise click.ClickException(
            f"{reach.address} has no note of request {printable(str(request_id))}: "
            "it is too old, or its engine does not report there"
        )
    _show(explanation, as_json=as_json)


def _show(explanation: Explanation, *, as_json: bool) -> None:
    click.echo(explanation.to_json() if as_json else _table(explanation))


def _explained_by_cluster(config: ClusterConfig, about: Callable[..., Explanation]) -> Explanation:
    """Raises `ConfigError` if no node answers."""
    with contextlib.closing(open_cluster(config)) as cluster:
        if not cluster.wait_until_known(config.timeout_s):
            raise ConfigError(f"no node of the cluster answers: {', '.join(config.valkey)}")
        return about(AskedCluster(cluster, config), tier="cluster")


def _table(explanation: Explanation) -> str:
    cached = ", ".join(f"{tier} {count}" for tier, count in explanation.cached_tokens.items() if count)
    rows = {
        "request": explanation.request_id,
        "model": explanation.model,
        "namespace": explanation.namespace[:12],
        "prompt": f"{explanation.prompt_tokens} tokens in blocks of {explanation.block_tokens}",
        "cached": f"{sum(explanation.cached_tokens.values())} tokens" + (f" ({cached})" if cached else ""),
        "ended at": f"token {explanation.ended_at_tokens}",
        "because": explanation.reason.value + (f" ({explanation.tier})" if explanation.tier else ""),
        "detail": explanation.detail,
    }
    lines = [f"{name:10} {printable(value, _LONGEST)}" for name, value in rows.items() if value]
    sentences = [explanation.sentence(), *explanation.retention_sentences(), *explanation.parting_sentences()]
    return "\n".join([*lines, "", *(printable(sentence, _LONGEST) for sentence in sentences)])


def _explain_by_engine(address: str, request_id: str | None, *, as_json: bool) -> None:
    if request_id is None:
        raise click.UsageError("Give the id of a request, for --engine.")
    try:
        parting = ask_parting(engine_socket(address), request_id, _TIMEOUT_S)
    except KvtierError as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error
    if parting is None:
        raise click.ClickException(f"{address} does not know request {printable(request_id)}: it is too old")
    _show_parting(parting, as_json=as_json)


def _do_engines_tell(request_id: str | None, *, as_json: bool) -> bool:
    """Whether an engine of this user's deployments knows the request; if so, its answer is shown."""
    for address in find_engines() if request_id is not None else ():
        with contextlib.suppress(KvtierError):
            parting = ask_parting(engine_socket(address), str(request_id), _TIMEOUT_S)
            if parting is not None:
                _show_parting(parting, as_json=as_json)
                return True
    return False


def _show_parting(parting: Parting, *, as_json: bool) -> None:
    sentences = [parting.sentence(), *parting.advice()]
    text = "\n".join(printable(sentence, _LONGEST) for sentence in sentences)
    click.echo(msgspec.json.encode(parting).decode() if as_json else text)


def _with_parting(explanation: Explanation | None, server: str) -> Explanation | None:
    """With the engine's own details, if it is on this host and still running."""
    if explanation is None or not explanation.asked_at or not server.startswith("unix:"):
        return explanation
    try:
        parting = ask_parting(engine_socket(explanation.asked_at), explanation.request_id, _TIMEOUT_S)
    except KvtierError:
        return explanation
    return explanation if parting is None else msgspec.structs.replace(explanation, parting=parting)


def _token_ids(folder: Path, prompt: str | None, prompt_file: Path | None, tokens: str | None) -> list[int]:
    if tokens is not None:
        try:
            return [int(token) for token in tokens.split(",")]
        except ValueError as error:
            raise ConfigError(
                f"token ids are whole numbers with commas between them, not {printable(repr(tokens))}"
            ) from error
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ConfigError(f"{prompt_file} is not text in UTF-8: {error}") from error
    assert prompt is not None
    try:  # not above: it imports transformers, which only a prompt's text needs
        from kvtier.models.tokenizer import Tokenizer  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "a prompt's text needs a tokenizer: pip install 'kvtier[engine]', or give --tokens"
        ) from error
    return Tokenizer(folder).encode(prompt)


def _dummy_weights(config: ModelConfig, dtype: str, device: str) -> str:
    """The identity of the dummy weights that an engine would make."""
    try:  # not above: they import torch, which only dummy weights need
        import torch  # noqa: PLC0415

        from kvtier.models.dummy import dummy_identity  # noqa: PLC0415
        from kvtier.models.loading import DUMMY_SEED  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("dummy weights need the engine: pip install 'kvtier[engine]'") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cuda or cpu, not {device!r}") from error
    return dummy_identity(config, dtype=getattr(torch, dtype), device=place, seed=DUMMY_SEED)
