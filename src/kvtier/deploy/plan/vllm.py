"""From a model of the file that vLLM runs to its engines: each with its whole command line.

Settings that vLLM also has are passed to it as arguments; those that only kvtier's engine has are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvtier.deploy.file.native import EngineOptions, ModelSection
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.vllm_arguments import FIELDS, option_of
from kvtier.deploy.file.yaml_file import Location
from kvtier.deploy.plan.parts import CachePart, VllmPart
from kvtier.deploy.plan.runtime_names import RuntimeNames
from kvtier.deploy.plan.vllm_events import with_own_ports
from kvtier.errors import ConfigError
from kvtier.transport.address import parse_address

_PLAIN = frozenset({"engine", "vllm", "vllm_python", "prompt_events", "name", "engines", "device", "devices"})
_OF_CONNECTOR = {
    "salt": "salt",
    "always_load": "always_load",
    "identity": "identity",
    "cache_server_token_file": "token_file",
    "cache_server_secret_file": "secret_file",
    "cache_server_ca_file": "ca_file",
    "cache_server_certificate": "certificate",
    "cache_server_key": "key",
    "cache_server_timeout_s": "timeout_s",
}
"""Fields of a model that the connector also has, and its names for them."""

_USABLE = _PLAIN | FIELDS.keys() | _OF_CONNECTOR.keys() | {"cache_server"}
_HINTS = {
    "swap_space": "give the cache more memory",
    "kv_cache_space": "use gpu_memory_utilization, or on CPUs VLLM_CPU_KVCACHE_SPACE in the environment",
    "default_options": "give vllm --override-generation-config",
    "tool_format": "give vllm --enable-auto-tool-choice and --tool-call-parser",
    "reasoning_format": "give vllm --reasoning-parser",
    "block_size": "give vllm --block-size",
    "cuda_graphs": "give vllm --enforce-eager",
}


def plan_vllm(
    model: ModelSection,
    found: str,
    names: Sequence[str],
    cache: CachePart | None,
    place: Location,
    origin: Origin,
    runtime_names: RuntimeNames,
) -> tuple[VllmPart, ...]:
    """One per engine. `found` is the model's folder or its name on the hub, `names` are its names for clients."""
    _check_fields(model, place, origin)
    for name in ("mooncake", "cluster", "objects"):
        if cache is not None and getattr(cache, name) is not None:
            hint = ", or one below its server" if name == "cluster" else ""
            raise origin.wrong(
                place, f"vLLM cannot use the {name} of {cache.name}: give it a cache without{hint}", about="cache"
            )
    for name in names:
        if name.startswith("-"):
            raise origin.wrong(place, f"name must not begin with a dash for vLLM, as {name!r} does", about="name")
    connector = _connector(model, cache, place, origin)
    has_events = connector is not None and model.prompt_events and len(model.device_of_each_engine) > 1
    python = sys.executable if model.vllm_python is None else str(model.vllm_python)
    if model.vllm_python is not None and not model.vllm_python.is_file():
        raise origin.wrong(place, f"vllm_python {python} does not exist", about="vllm_python")
    given = _arguments_of_fields(model, place, origin)
    parts = []
    devices = model.device_of_each_engine
    engine_names = runtime_names.take_several(names[0], len(devices))
    for number, (name, device) in enumerate(zip(engine_names, devices, strict=True)):
        socket = runtime_names.socket(name).path
        arguments = ["--model", found, "--served-model-name", *names, "--uds", socket, "--disable-uvicorn-access-log"]
        prompts_socket = runtime_names.socket(f"{name}.prompts").path if has_events else ""
        if connector is not None:
            arguments += ["--kv-transfer-config", _transfer_config(connector, prompts_socket)]
        parts.append(
            VllmPart(
                name=name,
                served_as=names[0],
                model=found,
                python=python,
                arguments=(*arguments, *given, *with_own_ports([str(one) for one in model.vllm], number)),
                device=device,
                socket=socket,
                cache_server=_address(model, cache),
                prompts_socket=prompts_socket,
            )
        )
    return tuple(parts)


def _check_fields(model: ModelSection, place: Location, origin: Origin) -> None:
    given = {option_of(str(argument)) for argument in model.vllm}
    for name in EngineOptions.__struct_fields__:
        if origin.find(place, name) is None:
            continue
        if name not in _USABLE:
            hint = f": {_HINTS[name]}" if name in _HINTS else ""
            raise origin.wrong(place, f"{name} is for kvtier's own engine, not for vLLM{hint}", about=name)
        if FIELDS.get(name) in given:
            raise origin.wrong(place, f"{name} and {FIELDS[name]} in vllm say the same: give one of them", about=name)


def _arguments_of_fields(model: ModelSection, place: Location, origin: Origin) -> list[str]:
    """Only the fields given in the file: vLLM has its own defaults for the others."""
    arguments: list[str] = []
    for name, option in FIELDS.items():
        value = getattr(model, name)
        if origin.find(place, name) is None or value is None or value is False:
            continue
        arguments += [option] if value is True else [option, str(value)]
    return arguments


def _address(model: ModelSection, cache: CachePart | None) -> str:
    """The address of the cache server; empty without one."""
    if cache is not None:
        return str(cache.server.unix)
    return str(model.cache_server)


def _connector(
    model: ModelSection, cache: CachePart | None, place: Location, origin: Origin
) -> dict[str, object] | None:
    """The connector's settings; None for a model without a cache."""
    address = _address(model, cache)
    if not address:
        return None
    try:
        parse_address(address)
    except ConfigError as error:
        raise origin.wrong(place, f"cache_server: {error}", about="cache_server") from error
    extra: dict[str, object] = {"server": address}
    for name, own in _OF_CONNECTOR.items():
        value = getattr(model, name)
        if origin.find(place, name) is not None and value is not None:
            extra[own] = str(value) if isinstance(value, Path) else value
    return extra


def _transfer_config(connector: Mapping[str, object], prompts_socket: str) -> str:
    """vLLM's `--kv-transfer-config`."""
    events = {"prompt_events": f"unix:{prompts_socket}"} if prompts_socket else {}
    config = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.plugins.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**connector, **events},
    }
    return msgspec.json.encode(config).decode()
