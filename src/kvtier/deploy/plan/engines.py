"""From the file's models to engines: each model's place, its names for clients, and its cache."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.deploy.file.form import absolute
from kvtier.deploy.file.named_file import read_secret, require_file
from kvtier.deploy.file.native import Deployment, EngineOptions, ModelSection
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.size import Size
from kvtier.deploy.file.yaml_file import Location
from kvtier.deploy.plan.parts import CachePart, EnginePart, VllmPart
from kvtier.deploy.plan.runtime_names import RuntimeNames
from kvtier.deploy.plan.vllm import plan_vllm
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.models.foreign_files import gguf_error, is_gguf_name
from kvtier.transport.address import parse_address

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_AS_GIVEN = sorted(set(EngineConfig.__struct_fields__) & set(EngineOptions.__struct_fields__) - {"device", "cache_dir"})
"""Settings with the same meaning in the file and to the engine."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model with its engines. The first of `names` is its own; lists show those in `listed`."""

    names: tuple[str, ...]
    listed: tuple[str, ...]
    parts: tuple[EnginePart, ...] | tuple[VllmPart, ...]


def plan_engines(
    deployment: Deployment, origin: Origin, names: RuntimeNames, caches: dict[str, CachePart]
) -> list[PlannedModel]:
    """One per model, in the file's order. Raises `ConfigError`, with lines."""
    found = [
        _find_model(model.model, origin, place) for model, place in zip(deployment.models, origin.models, strict=True)
    ]
    listed = _names_of_models(deployment, found, origin)
    called = _with_aliases(deployment, listed)
    planned = []
    for number, (model, place) in enumerate(zip(deployment.models, origin.models, strict=True)):
        cache = _cache_of(model, place, origin, caches)
        for field in _FILES:
            require_file(origin, place, field, getattr(model, field))
        plan = (model, found[number], called[number], cache, place, origin, names)
        parts = plan_vllm(*plan) if model.engine == "vllm" else _plan_own(*plan)
        planned.append(PlannedModel(called[number], listed[number], parts))
    return planned


def _plan_own(
    model: ModelSection,
    found: str,
    called: Sequence[str],
    cache: CachePart | None,
    place: Location,
    origin: Origin,
    names: RuntimeNames,
) -> tuple[EnginePart, ...]:
    """Like `plan_vllm`, for kvtier's own engine."""
    configs = _configs(model, found, cache, place, origin)
    return tuple(
        EnginePart(name=name, served_as=called[0], engine=config, socket=names.socket(name).path)
        for name, config in zip(names.take_several(called[0], len(configs)), configs, strict=True)
    )


def _find_model(model: str, origin: Origin, place: Location) -> str:
    """The absolute path of a folder beside the file or in the current one, or else a name on the hub."""
    try:
        given = Path(model).expanduser()
    except RuntimeError as error:
        raise origin.wrong(place, f"{model} has no folder behind its ~", about="model") from error
    for folder in (origin.file.path.parent / given, given):
        if model.strip() and folder.is_dir():
            return str(absolute(folder))
    if is_gguf_name(model):
        raise origin.wrong(place, str(gguf_error(model)), about="model")
    if not _HUB_NAME.fullmatch(model):
        raise origin.wrong(
            place, f"there is no model folder {model!r}, and a name on the hub is owner/name", about="model"
        )
    return model


def _names_of_models(deployment: Deployment, found: list[str], origin: Origin) -> list[tuple[str, ...]]:
    """The given names, or else that of the folder, or on the hub."""
    own = [
        model.names or (Path(where).name if Path(where).is_absolute() else where,)
        for model, where in zip(deployment.models, found, strict=True)
    ]
    taken: set[str] = set()
    for names, place in zip(own, origin.models, strict=True):
        for name in names:
            if name in taken:
                raise origin.wrong(place, f"two models are called {name!r}: give each a name of its own", about="name")
            taken.add(name)
    return own


def _with_aliases(deployment: Deployment, listed: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """With other names that clients may use: `model` as given, unless several models have it, and Ollama's names,
    which end in a tag."""
    taken = {name for names in listed for name in names}
    given = Counter(model.model for model in deployment.models)
    called = []
    for names, model in zip(listed, deployment.models, strict=True):
        aliases = [model.model] if given[model.model] == 1 else []
        aliases += [f"{name}:latest" for name in names if ":" not in name]
        called.append((*names, *(alias for alias in dict.fromkeys(aliases) if alias not in taken)))
        taken.update(aliases)
    return called


def _cache_of(model: ModelSection, place: Location, origin: Origin, caches: dict[str, CachePart]) -> CachePart | None:
    known = ", ".join(caches)
    if model.cache_server:
        if model.cache:
            raise origin.wrong(place, "cache_server takes the place of cache: give one of them")
        return None
    if model.cache is False or (model.cache is None and not caches):
        return None
    if isinstance(model.cache, str):
        if model.cache not in caches:
            there = f"there is {known}" if caches else "the file has no cache"
            raise origin.wrong(place, f"there is no cache {model.cache!r}; {there}", about="cache")
        return caches[model.cache]
    if not caches:
        raise origin.wrong(place, "cache is true, but the file has no cache")
    if len(caches) > 1:
        raise origin.wrong(place, f"there are several caches: say which with cache, one of {known}, or false")
    return next(iter(caches.values()))


_FILES = ("cache_server_ca_file", "cache_server_certificate", "cache_server_key")


def _configs(
    model: ModelSection, found: str, cache: CachePart | None, place: Location, origin: Origin
) -> list[EngineConfig]:
    """One per engine; they differ in their device."""
    token = read_secret(origin, place, "cache_server_token_file", model.cache_server_token_file)
    given: dict[str, Any] = {name: getattr(model, name) for name in _AS_GIVEN}
    settings: dict[str, Any] = {name: int(value) if isinstance(value, Size) else value for name, value in given.items()}
    settings["cache_dir"] = None if model.cache_dir is None else str(model.cache_dir)
    settings["cache_server_token"] = token
    settings["cache_server_secret"] = read_secret(
        origin, place, "cache_server_secret_file", model.cache_server_secret_file
    )
    for field in _FILES:
        settings[field] = None if getattr(model, field) is None else str(getattr(model, field))
    if cache is not None:
        settings["cache_server"] = str(cache.server.unix)
        settings["mooncake"] = cache.mooncake
        settings["cluster"] = cache.cluster
        settings["objects"] = cache.objects
    try:
        configs = [EngineConfig(model=found, device=device, **settings) for device in model.device_of_each_engine]
    except ConfigError as error:
        raise origin.wrong(place, str(error)) from error
    try:
        if configs[0].cache_server:
            parse_address(configs[0].cache_server)
    except ConfigError as error:
        raise origin.wrong(place, f"cache_server: {error}", about="cache_server") from error
    return configs
