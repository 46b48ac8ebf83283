"""The other form of a deployment file: `chat`, `remote_kv_cache`, `entrypoints`. It is translated to the native one.

Models keep their settings in `engine_args`, which also accepts every setting of the native form. A cache belongs to the
model that it names. `http` may be given as in the native form.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvtier.deploy.file.form import read_form, unknown
from kvtier.deploy.file.native import (
    DEFAULT_OLLAMA_PORT,
    DEFAULT_OPENAI_PORT,
    CacheOptions,
    CacheSection,
    Deployment,
    EngineOptions,
    HttpSection,
    ModelSection,
    check_model,
)
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.size import Size
from kvtier.deploy.file.yaml_file import Location, YamlFile
from kvtier.errors import ConfigError

_PASSAGE_BYTES = 1 << 30
"""Memory that blocks pass through if they are kept on disk only."""

_APIS = {"openai_compatible": ("openai", DEFAULT_OPENAI_PORT), "ollama_compatible": ("ollama", DEFAULT_OLLAMA_PORT)}
_RENAMED = {
    "cache": "remote_kv_cache_server",
    "block_manager": "enable_prefix_caching",
    "memory": "memory_space",
    "disk": "file_space",
    "folder": "kv_cache_folder",
}


class ChatEngineArgs(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run."""

    enable_prefix_caching: bool | None = None
    """Share the device's blocks between requests; `block_manager` offers finer control."""
    remote_kv_cache_server: bool | None = None
    """Use the cache that `remote_kv_cache` has for this model; by default it does if there is one."""


class ChatModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model."""

    model: str
    """A folder, or the name of a model on the hub, which is downloaded once."""
    engine_args: ChatEngineArgs = ChatEngineArgs()
    """How it is run."""

    def __post_init__(self) -> None:
        check_model(self.model)


class ChatSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served."""

    models: tuple[ChatModel, ...]
    """One or more."""


class ChatCacheArgs(CacheOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a cache is kept."""

    block_size: int = 16
    """Tokens in a block; the same as the model's."""
    memory_space: Size = Size(0)
    """Limit on memory for blocks; without it, they are kept on disk only."""
    file_space: Size | None = None
    """Limit on space for everything in `kv_cache_folder`; without it, blocks are kept in memory only."""
    kv_cache_folder: Path | None = None
    """Keep blocks on disk, too, across restarts. Created if it does not exist."""

    def __post_init__(self) -> None:
        if self.file_space and self.kv_cache_folder is None:
            raise ConfigError("file_space needs a kv_cache_folder to keep blocks in")
        if self.file_space is None and self.kv_cache_folder is not None:
            raise ConfigError("kv_cache_folder needs file_space, the most space it may take; 0 is none")
        if not self.memory_space and not self.file_space:
            raise ConfigError("a cache needs memory_space, or file_space and kv_cache_folder, or all of them")


class ChatCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cache of a model."""

    model: str
    """The model, as given in `chat`."""
    engine_args: ChatCacheArgs
    """How it is kept."""


class Entrypoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an API listens."""

    host: str | None = None
    """By default that of `http`."""
    port: int | None = None
    """By default the API's usual port."""


class ChatDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    chat: ChatSection
    """What is served."""
    remote_kv_cache: tuple[ChatCache, ...] = ()
    """A cache for each model that is to have one."""
    entrypoints: tuple[str | dict[str, Entrypoint | None], ...] | None = None
    """`openai_compatible`, `ollama_compatible`, or both; each may be a mapping with `host` and `port`."""
    http: HttpSection = HttpSection()
    """As in the native form; if `entrypoints` is given, it decides which APIs are served."""


def is_chat_form(keys: Iterable[str]) -> bool:
    """Whether a file with these keys is meant to have this form."""
    names = set(keys)
    own = [name for name in ChatDeployment.__struct_fields__ if name not in Deployment.__struct_fields__]
    if names & {*own, *Deployment.__struct_fields__} - {"http"}:
        return not names.isdisjoint(own)
    return any(difflib.get_close_matches(name, own) for name in names)


def read_chat_form(file: YamlFile) -> tuple[Deployment, Origin]:
    """Raises `ConfigError`, with lines, for anything invalid."""
    form = read_form(file, (), ChatDeployment)
    origin = Origin(
        file,
        models=tuple(("chat", "models", number, "engine_args") for number in range(len(form.chat.models))),
        caches=tuple(("remote_kv_cache", number, "engine_args") for number in range(len(form.remote_kv_cache))),
        http=("http",) if file.has(("http",)) else ("entrypoints",),
        renamed=_RENAMED,
    )
    if not form.chat.models:
        raise file.error(("chat", "models"), "chat.models is empty: there is nothing to serve")
    names = _names_of_caches(form, origin)
    return (
        Deployment(
            models=tuple(
                _model(model, names.get(model.model), origin, place)
                for model, place in zip(form.chat.models, origin.models, strict=True)
            ),
            cache=tuple(
                _cache(cache.engine_args, names[cache.model], origin, place)
                for cache, place in zip(form.remote_kv_cache, origin.caches, strict=True)
            ),
            http=_http(file, form),
        ),
        origin,
    )


def _names_of_caches(form: ChatDeployment, origin: Origin) -> dict[str, str]:
    """Names of caches, by the model that each is for."""
    names: dict[str, str] = {}
    for number, (cache, place) in enumerate(zip(form.remote_kv_cache, origin.caches, strict=True)):
        users = [model for model in form.chat.models if model.model == cache.model]
        if not users:
            known = ", ".join(dict.fromkeys(model.model for model in form.chat.models))
            raise origin.wrong(
                place, f"remote_kv_cache[{number}] is for {cache.model}, but chat has {known}", about="model"
            )
        if cache.model in names:
            raise origin.wrong(place, f"{cache.model} has two entries in remote_kv_cache", about="model")
        for model in users:
            if model.engine_args.block_size != cache.engine_args.block_size:
                raise origin.wrong(
                    place,
                    f"block_size is {cache.engine_args.block_size} here and {model.engine_args.block_size} "
                    f"in the chat model {cache.model}: they must be equal",
                    about="block_size",
                )
        names[cache.model] = "cache" if len(form.remote_kv_cache) == 1 else f"cache-{number}"
    return names


def _model(model: ChatModel, cache: str | None, origin: Origin, place: Location) -> ModelSection:
    args = model.engine_args
    if args.remote_kv_cache_server and cache is None:
        raise origin.wrong(place, f"remote_kv_cache_server is on, but remote_kv_cache has no entry for {model.model}")
    settings: dict[str, Any] = {name: getattr(args, name) for name in EngineOptions.__struct_fields__}
    if args.enable_prefix_caching is not None:
        if origin.file.has((*place, "block_manager")):
            raise origin.wrong(place, "enable_prefix_caching and block_manager say the same: give one of them")
        settings["block_manager"] = "prefix_caching" if args.enable_prefix_caching else "disable_prefix_caching"
    is_cached = cache is not None and args.remote_kv_cache_server is not False
    return ModelSection(model=model.model, cache=cache if is_cached and cache else False, **settings)


def _cache(args: ChatCacheArgs, name: str, origin: Origin, place: Location) -> CacheSection:
    settings: dict[str, Any] = {name: getattr(args, name) for name in CacheOptions.__struct_fields__}
    try:
        return CacheSection(
            name=name,
            memory=args.memory_space or Size(min(_PASSAGE_BYTES, args.file_space or 0)),
            disk=args.file_space or None,
            folder=args.kv_cache_folder if args.file_space else None,
            disk_only=not args.memory_space,
            **settings,
        )
    except ConfigError as error:
        raise origin.wrong(place, str(error)) from error


def _http(file: YamlFile, form: ChatDeployment) -> HttpSection:
    if form.entrypoints is None:
        return form.http
    if not form.entrypoints:
        raise file.error(("entrypoints",), f"entrypoints is empty: list {' or '.join(_APIS)}")
    ports: dict[str, int | str | bool | None] = {"openai": False, "ollama": False}
    for number, entry in enumerate(form.entrypoints):
        for name, given in ({entry: None} if isinstance(entry, str) else entry).items():
            place: Location = ("entrypoints", number)
            if name not in _APIS:
                raise file.error(place, f"entrypoints[{number}]: {unknown(name, _APIS)}")
            api, usual = _APIS[name]
            if HttpSection.is_served(ports[api]):
                raise file.error(place, f"{name} is listed twice")
            if not HttpSection.is_served(getattr(form.http, api)):
                raise file.error(place, f"{name} is listed, but http.{api} says that it is not served")
            ports[api] = _port(given or Entrypoint(), getattr(form.http, api), usual)
    try:
        return msgspec.structs.replace(form.http, **ports)
    except ConfigError as error:
        raise file.error(("entrypoints",), str(error)) from error


def _port(given: Entrypoint, of_http: int | str | bool | None, usual: int) -> int | str | bool | None:
    if given.host is None:
        return of_http if given.port is None else given.port
    port = given.port
    if port is None:
        port = of_http if isinstance(of_http, int) and not isinstance(of_http, bool) else usual
    return f"[{given.host}]:{port}" if ":" in given.host else f"{given.host}:{port}"
