"""What a scheduler and its workers tell each other with each step. Picklable.

A request's pages are given from some page on, and blocks are counted from that page's first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.blocks.hashing import BlockHash
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.load_news import Loaded
from kvtier.transfer.shared_stores import Slots

PIECE_BYTES = 64 << 20
"""Blocks are shown to others when so many are written, and go over TCP by as many."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring the blocks with these hashes into pages, the first of them at `first_block`, within `timeout_s`.

    Where they lie is `leased`, if the scheduler knows: until all workers say that the load of this `number` is over.
    """

    number: int
    request_id: str
    pages: list[int]
    first_block: int
    hashes: list[BlockHash]
    timeout_s: float
    leased: LeasedBlocks | None
    num_tokens: int
    """What they stand for."""


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the blocks with these hashes. Without `slots` the worker finds room itself: it has all of each block.

    With a `number` the scheduler holds the pages until the worker says that this save is over.
    """

    request_id: str
    pages: list[int]
    first_block: int
    hashes: list[BlockHash]
    slots: Slots | None = None
    number: int | None = None

    def parts(self, num_blocks: int) -> Iterator[Save]:
        """The same by at most `num_blocks`, unless its slots are reserved already."""
        if self.slots is not None or len(self.hashes) <= num_blocks:
            yield self
            return
        for first in range(0, len(self.hashes), num_blocks):
            yield replace(self, first_block=self.first_block + first, hashes=self.hashes[first : first + num_blocks])


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """`preempted` requests lose their pages in this step: what is being saved of them must be done before.

    Of `ended` requests nothing more comes to be saved: their pages go back as soon as what was asked for is done. In a
    step that `is_idle`, nothing is computed.
    """

    number: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    is_idle: bool = False


@dataclass(slots=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """What a worker has done since it last said so. Added over the ranks: counts are of those that are through."""

    step: int = 0
    loaded: list[Loaded] = field(default_factory=list)
    ended_loads: Counter[int] = field(default_factory=Counter)
    failed_loads: set[str] = field(default_factory=set)
    written: Counter[int] = field(default_factory=Counter)
    unwritten: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        assert isinstance(other, WorkerNews)
        return WorkerNews(
            max(self.step, other.step),
            self.loaded + other.loaded,
            self.ended_loads + other.ended_loads,
            self.failed_loads | other.failed_loads,
            self.written + other.written,
            self.unwritten | other.unwritten,
            self.saved | other.saved,
        )
