"""Blocks of one request on their way from a tier to the device. Shared by the engine's thread and one tier thread.

A load brings its blocks from the front, or from the back while the engine computes from the front until both meet.
After a load is abandoned, no byte is written to the device's blocks. No torch.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.memory.lease import Lease
from kvtier.transfer.copier import Copies, Mark


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks `first..end` of a prompt, which lie in `lease` from `lease_first` on; without a lease, they are on disk.

    `tier` is where their bytes are. `asked` is the tier of the hierarchy that answers for them: a server also answers
    for its disk and its cluster.
    """

    tier: str
    asked: str
    first: int
    end: int
    lease: Lease | None
    lease_first: int

    def place(self, position: int) -> int:
        """The index in the lease of the prompt's block `position`."""
        return self.lease_first + position - self.first

    @property
    def is_in_memory(self) -> bool:
        """Its blocks are in this host's memory."""
        return self.comes_in_order and not self.is_below

    @property
    def is_below(self) -> bool:
        """The tier that answers for them still has to read them."""
        return self.tier != self.asked

    @property
    def comes_in_order(self) -> bool:
        """Its blocks are in this host's memory, or are being read into it, in order."""
        return self.lease is not None and self.lease.has_views


class Order(enum.Enum):
    """Which blocks come first."""

    FRONT = enum.auto()
    BACK = enum.auto()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load blocks `first..end` of `span`, `unit` at a time if they come one after another.

    In a load from the back, both sides should meet after `meets_after_s`.
    """

    span: Span
    first: int
    end: int
    order: Order
    expected_s: float | None
    unit: int
    meets_after_s: float = 0.0


@dataclass(slots=True)
class LoadTimes:
    """Times in seconds, all of one clock."""

    started_at: float
    picked_at: float | None = None
    """When a tier thread took on the load: loads that were begun earlier are served first."""
    ended_at: float = 0.0


class Load:
    """`_taken` is the range that the tier's thread has taken on. Within it, `_num_arrived` blocks have arrived."""

    def __init__(
        self,
        plan: LoadPlan,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        after: Mark,
        started_at: float,
        behind: Load | None = None,
    ) -> None:
        """`hashes` and `block_ids` are those of blocks `plan.first..plan.end`; `behind` loads the blocks before."""
        self.plan = plan
        self.hashes = hashes
        self.block_ids = block_ids
        self.after = after
        self.times = LoadTimes(started_at)
        self._behind = behind
        self.copies: list[Copies] = []
        self.lacks_room = False
        """There was no host memory for the blocks to pass through."""
        self.front = plan.first
        """The engine computes, or has computed, everything before this block."""
        self._lock = threading.Lock()
        start = plan.first if plan.order is Order.FRONT else plan.end
        self._taken = (start, start)
        self._num_arrived = 0
        self._is_abandoned = False
        self._is_submitted = False
        self._is_over = False

    # --- the tier's thread -----------------------------------------------------------------------------------------

    def take(self, count: int) -> tuple[int, int]:
        """The next blocks to bring, at most `count`, as positions in the prompt. Equal positions: none are left."""
        with self._lock:
            if self._is_abandoned:
                return 0, 0
            if self.plan.order is Order.FRONT:
                first = self._taken[1]
                end = min(first + count, self.plan.end)
                self._taken = (self._taken[0], end)
            else:
                end = self._taken[0]
                first = max(self.front, end - count)
                self._taken = (first, self._taken[1])
            return first, end

    def write(self, first: int, end: int, begin: Callable[[Sequence[int]], Copies]) -> Copies | None:
        """Let `begin` copy into the device's blocks for `first..end`. None, and nothing is written, once abandoned.

        Fewer blocks may have arrived than were taken; then `first..end` is the beginning or the end of what was taken.
        """
        with self._lock:
            if self._is_abandoned:
                return None
            copies = begin(self.block_ids[first - self.plan.first : end - self.plan.first])
            self.copies.append(copies)
            self._num_arrived += end - first
            return copies

    def submit_all(self) -> None:
        """Everything was handed to the device."""
        with self._lock:
            self._is_submitted = True

    def end(self) -> None:
        """The tier's thread is done with this load."""
        with self._lock:
            self._is_over = True

    # --- the engine's thread ---------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether it was begun behind another load: then its duration says little about its tier."""
        return self._behind is not None

    @property
    def turned_at(self) -> float:
        """When its turn came: a thread has taken it on, and the load before it was over."""
        times = self.times
        turned_at = times.started_at if times.picked_at is None else times.picked_at
        return turned_at if self._behind is None else max(turned_at, self._behind.times.ended_at)

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def is_abandoned(self) -> bool:
        return self._is_abandoned

    @property
    def is_submitted(self) -> bool:
        """Every block is in this host's memory, and its copy was handed to the device."""
        return self._is_submitted

    @property
    def num_blocks(self) -> int:
        return self.plan.end - self.plan.first

    @property
    def num_arrived(self) -> int:
        return self._num_arrived

    @property
    def num_left(self) -> int:
        """Blocks between the engine's front and what the tier's thread has taken on."""
        with self._lock:
            return max(0, self._open_end() - self.front)

    def claim(self, count: int) -> int:
        """The engine is going to compute up to `count` blocks at its front; returns how many."""
        with self._lock:
            count = max(0, min(count, self._open_end() - self.front))
            self.front += count
            return count

    @property
    def has_met(self) -> bool:
        """For a load from the back: all blocks before those that arrived are computed, and none are on their way."""
        with self._lock:
            return (self._is_over or self._is_abandoned) and self.front >= self._arrived_first()

    def abandon(self) -> list[Copies]:
        """Stop writing. What was handed to the device has arrived once the returned copies are done."""
        with self._lock:
            self._is_abandoned = True
            return list(self.copies)

    def arrived(self) -> tuple[int, int]:
        """The blocks that have arrived, or will have arrived once `copies` are done."""
        with self._lock:
            if self.plan.order is Order.FRONT:
                return self.plan.first, self.plan.first + self._num_arrived
            return self._arrived_first(), self.plan.end

    def _arrived_first(self) -> int:
        return self.plan.end - self._num_arrived

    def _open_end(self) -> int:
        """The block up to which only the engine fills blocks. In a load from the front, the tier brings all of them."""
        if self.plan.order is Order.FRONT:
            return self.front
        if self._is_over or self._is_abandoned:
            return self._arrived_first()
        return self._taken[0]
