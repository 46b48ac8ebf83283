"""What a scheduler and its workers tell each other with each step. Picklable.

A request's pages are given from some page on, and blocks are counted from that page's first token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Load:
    """Bring the blocks with these hashes into pages, the first of them at `first_block`, within `timeout_s`."""

    request_id: str
    pages: list[int]
    first_block: int
    hashes: list[bytes]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the scheduler has reserved room: `offsets[i]`, in the arena with this inode, is for `positions[i]`."""

    job: int
    arena_inode: int
    positions: list[int]
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the blocks with these hashes. Without `slots` the worker finds room itself: it has all of each block."""

    request_id: str
    pages: list[int]
    first_block: int
    hashes: list[bytes]
    slots: Slots | None = None


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """`preempted` requests lose their pages in this step: what is being saved of them must be done before.

    Of `ended` requests nothing more comes to be saved: their pages go back as soon as what was asked for is done.
    """

    number: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that is over: how many bytes came from a tier, and how long that took."""

    tier: str
    nbytes: int
    seconds: float


@dataclass(slots=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """What a worker has done since it last said so. Added over the ranks: `written` counts those that are through."""

    step: int = 0
    loaded: list[Loaded] = field(default_factory=list)
    failed_loads: set[str] = field(default_factory=set)
    written: Counter[int] = field(default_factory=Counter)
    unwritten: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        assert isinstance(other, WorkerNews)
        return WorkerNews(
            max(self.step, other.step),
            self.loaded + other.loaded,
            self.failed_loads | other.failed_loads,
            self.written + other.written,
            self.unwritten | other.unwritten,
        )
