"""The messages between a scheduler and its workers in each step. Picklable.

The pages of a load or save begin at some page of the request; its blocks are counted from that page's first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.blocks.hashing import BlockHash
from kvtier.memory.lease import DISK
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.load_news import Loaded
from kvtier.transfer.shared_stores import ReservedRoom

PIECE_BYTES = 64 << 20
"""Blocks per commit, and per batch over TCP."""


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Load the blocks with these hashes into pages, beginning at `first_block`, within `timeout_s`.

    `leased` has their places in memory, if the scheduler knows them; they are valid until all workers have reported
    the end of this load by its `number`.
    """

    number: int
    request_id: str
    pages: list[int]
    first_block: int
    hashes: list[BlockHash]
    timeout_s: float
    leased: LeasedBlocks | None
    num_tokens: int
    """The tokens of these blocks."""
    stored_in: str = DISK
    """The tier of the blocks that are not in the server's memory."""


@dataclass(frozen=True, slots=True)
class Save:
    """Store the blocks with these hashes. Without `slots` the worker reserves room itself: it has all of each block.

    With a `number` the scheduler holds the pages until the worker reports the end of this save.
    """

    request_id: str
    pages: list[int]
    first_block: int
    hashes: list[BlockHash]
    slots: ReservedRoom | None = None
    number: int | None = None

    def parts(self, num_blocks: int) -> Iterator[Save]:
        """The save in parts of at most `num_blocks`; whole if its slots are already reserved."""
        if self.slots is not None or len(self.hashes) <= num_blocks:
            yield self
            return
        for first in range(0, len(self.hashes), num_blocks):
            yield replace(self, first_block=self.first_block + first, hashes=self.hashes[first : first + num_blocks])


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """`preempted` requests lose their pages in this step: copies of them must finish first.

    `ended` requests have no further saves: their pages are freed when the requested ones are done. A step that
    `is_idle` computes nothing. When it was planned, the scheduler knew the workers' results up to step `known_step`:
    nothing in this step depends on loads that were reported later. It is the first to use the loads with these numbers
    (`first_used`), and only reads their pages.
    """

    number: int = 0
    known_step: int = 0
    loads: list[PageLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    first_used: set[int] = field(default_factory=set)
    is_idle: bool = False


@dataclass(slots=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """A worker's progress since its last report, summed over ranks: counts are of ranks that have finished."""

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
