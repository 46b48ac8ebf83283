"""The values that the page shows, which become JSON: fill levels of tiers, engines, cache servers, namespaces."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvtier.api.page.moved_blocks import Move
from kvtier.api.request_log import RequestLog
from kvtier.api.token_history import TokenHistory, Tokens


class TierLevel(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of one `owner`, an engine or a cache server. Unknown values are None.

    `in_bytes_per_s` and `out_bytes_per_s` are rates into and out of the tier since the previous reading.
    """

    name: str
    owner: str
    room_bytes: int | None = None
    used_bytes: int | None = None
    pinned_bytes: int | None = None
    leased_bytes: int | None = None
    blocks: int | None = None
    is_up: bool = True
    in_bytes_per_s: float | None = None
    out_bytes_per_s: float | None = None


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is "ready", "starting", "hung" or, for vLLM, "stopping"; `kind` is "kvtier" or "vllm"; `since` is when
    it became ready.

    `loading_off` says why nothing is loaded from the tiers, and is empty while loading is on. `canary_checks` has
    counts by result since the engine started.
    """

    name: str
    model: str
    kind: str
    status: str
    since: float | None = None
    device: str = ""
    namespace: str = ""
    running: int | None = None
    waiting: int | None = None
    loading_off: str = ""
    canary_checks: dict[str, int] = {}


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """`status` is "ready" or "away". `losses` are blocks lost on disk or in the cluster, by kind."""

    name: str
    address: str
    status: str
    uptime_s: float | None = None
    clients: int | None = None
    leases: int | None = None
    blocks: int | None = None
    evicted_blocks: int | None = None
    hit_blocks: int | None = None
    missed_blocks: int | None = None
    losses: dict[str, int] = {}


class NamespaceState(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one namespace on one cache server. `models` are the models whose engines use it."""

    namespace: str
    cache: str
    name: str
    models: list[str] = []
    tenant: str = ""
    blocks: int = 0
    bytes: int = 0
    disk_blocks: int = 0


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The share of requested tokens that a cache of each size would have had: points of (bytes, share)."""

    cache: str
    points: list[tuple[float, float]]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """All values at one time. `moved` has the bytes since the start."""

    status: str
    tiers: list[TierLevel] = []
    engines: list[EngineState] = []
    caches: list[CacheState] = []
    namespaces: list[NamespaceState] = []
    curves: list[Curve] = []
    moved: dict[Move, float] = {}
    saved_s: float | None = None
    unvalued_tokens: int = 0
    num_namespaces: int = 0


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time saved since the engines started; `money` if the deployment has a price.

    `unvalued_tokens` are cached tokens that are not in it, as the speed of their engine was not measured yet. While
    there are no others, `gpu_s` is None.
    """

    gpu_s: float | None = None
    unvalued_tokens: int = 0
    money: float | None = None
    currency: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/kvtier/v1/state`. `tokens` has counts by time span.

    `prefix_changes` counts changes of named prefixes since the start; None for a server without any.
    """

    at: float
    kind: str
    status: str
    uptime_s: float
    tiers: list[TierLevel]
    tokens: dict[str, Tokens]
    saved: Saved
    engines: list[EngineState]
    caches: list[CacheState]
    curves: list[Curve]
    num_requests: int | None = None
    prefix_changes: int | None = None


class ShownWarning(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    level: str
    text: str
    source: str


class View(Protocol):
    """The subject of a page: a deployment, or a single cache server."""

    @property
    def kind(self) -> str: ...

    @property
    def log(self) -> RequestLog: ...

    @property
    def history(self) -> TokenHistory: ...

    @property
    def num_requests(self) -> int | None:
        """Requests in flight."""

    @property
    def prefix_changes(self) -> int | None:
        """Changes of named prefixes since the start; None for a server without any."""

    async def read(self) -> Reading:
        """Read all values; may wait a second or two. Processes that do not answer are left out or shown as away."""

    async def warnings(self) -> list[ShownWarning]: ...

    async def explain(self, request_id: str, *, with_text: bool) -> dict[str, object] | None:
        """More about a request than `log` has; None if the request is unknown."""

    def rest(self) -> None:
        """There are no readers for now: close the connections that reading needs."""

    def close(self) -> None:
        """Close for good. Safe to call twice."""
