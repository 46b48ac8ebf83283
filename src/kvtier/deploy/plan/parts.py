"""The parts of a deployment, each with all it needs to start. `deploy/plan/deployment` makes them from a file.

Each part is a process of its own and gets its value from here as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvtier.api.config import ApiConfig
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.engine.config import EngineConfig
from kvtier.stores.mooncake.config import MooncakeConfig
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.stores.valkey.config import ClusterConfig

_Part = TypeVar("_Part")


class CachePart(msgspec.Struct, frozen=True, kw_only=True):
    """A cache server. Its engines reach it at `server.unix`, and also use the tiers beside it.

    A cluster is one of these tiers, unless it sits below the server (`server.cluster`).
    """

    name: str
    server: CacheServerConfig
    mooncake: MooncakeConfig | None = None
    cluster: ClusterConfig | None = None
    objects: ObjectsConfig | None = None


class EnginePart(msgspec.Struct, frozen=True, kw_only=True):
    """An engine. The HTTP server reaches it at `socket`; `served_as` is its model's name for clients."""

    name: str
    served_as: str
    engine: EngineConfig
    socket: str


class VllmPart(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of vLLM: the Python that has it, and all of its arguments. `cache_server` is empty without one, and
    `prompts_socket` if it does not report which prompts are in its cache.

    It has the deployment's environment, except that it sees only the GPUs of `device`.
    """

    name: str
    served_as: str
    model: str
    python: str
    arguments: tuple[str, ...]
    device: str
    socket: str
    cache_server: str = ""
    prompts_socket: str = ""


class Listener(msgspec.Struct, frozen=True):
    """An address that an API is served on."""

    api: Literal["openai", "ollama"]
    host: str
    port: int


class HttpPart(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server. The supervisor binds the listeners' sockets and hands them over, in this order."""

    name: str
    api: ApiConfig
    listeners: tuple[Listener, ...]


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    caches: tuple[CachePart, ...]
    engines: tuple[EnginePart, ...]
    vllm_engines: tuple[VllmPart, ...] = ()
    http: HttpPart


DeploymentPart = CachePart | EnginePart | VllmPart | HttpPart


def encode_part(part: DeploymentPart) -> bytes:
    return msgspec.json.encode(part, enc_hook=_encode_path)


def decode_part(data: bytes, kind: type[_Part]) -> _Part:
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_path)


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a part holds no {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    if kind is object:  # plain JSON already
        return value
    raise TypeError(f"a part holds no {kind.__name__}")
