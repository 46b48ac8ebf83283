"""What the page shows, as values: levels of tiers, engines, cache servers, namespaces. Each becomes JSON as it is."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvtier.api.page.moved_blocks import Move
from kvtier.api.request_log import RequestLog
from kvtier.api.token_history import TokenHistory, Tokens


class TierLevel(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of one `owner`, an engine or a cache server. What is not known is None.

    `in_bytes_per_s` go into the tier and `out_bytes_per_s` come out of it, since the page looked last.
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
    """`status` is "ready", "starting" or "hung"; `kind` is "kvtier" or "vllm"; `since` is when it was ready.

    `loading_off` says why nothing is loaded from the tiers, and is empty while loading is on. `canary_checks` are
    counted by result since the engine started.
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
    """Blocks of one model on one cache server. `models` are those of the engines that share them."""

    namespace: str
    cache: str
    name: str
    models: list[str] = []
    tenant: str = ""
    blocks: int = 0
    bytes: int = 0
    disk_blocks: int = 0


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """What share of the tokens asked for a cache of each size would have had: points of (bytes, share)."""

    cache: str
    points: list[tuple[float, float]]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at everything. `moved` are bytes since the start."""

    status: str
    tiers: list[TierLevel] = []
    engines: list[EngineState] = []
    caches: list[CacheState] = []
    namespaces: list[NamespaceState] = []
    curves: list[Curve] = []
    moved: dict[Move, float] = {}
    saved_s: float | None = None
    num_namespaces: int = 0


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What was not computed since the engines started; `money` where the deployment has a price."""

    gpu_s: float | None = None
    money: float | None = None
    currency: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What `/kvtier/v1/state` answers. `tokens` are by the time over which they were counted."""

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


class ShownWarning(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    level: str
    text: str
    source: str


class View(Protocol):
    """Who is looked at: a deployment, or a cache server alone."""

    @property
    def kind(self) -> str: ...

    @property
    def log(self) -> RequestLog: ...

    @property
    def history(self) -> TokenHistory: ...

    @property
    def num_requests(self) -> int | None:
        """Requests that are being answered."""

    async def read(self) -> Reading:
        """May wait for others, for a second or two. What does not answer is left out, or shown as away."""

    async def warnings(self) -> list[ShownWarning]: ...

    async def explain(self, request_id: str, *, with_text: bool) -> dict[str, object] | None:
        """More than `log` has of a request; None if nothing is known of it."""

    def rest(self) -> None:
        """Nobody looks for now: connections for this are closed."""

    def close(self) -> None:
        """For good. Safe to call twice."""
