"""Blocks of one request on their way from a tier to the device. Shared by the engine's thread and one of the tiers'.

A load takes its blocks from the front, or from the back while the engine computes from the front until both meet. No
byte is written to a block of the device once the load was abandoned. No torch.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.memory.lease import Lease
from kvtier.transfer.copier import Copies, Mark

DISK = "disk"
"""The tier of blocks that a cache server has still to read."""


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks `first..end` of a prompt, which lie in `lease` from `lease_first` on; without one, they are on disk.

    `tier` is where their bytes are, `asked` the tier of the hierarchy that answers for them: a server for its disk too.
    """

    tier: str
    asked: str
    first: int
    end: int
    lease: Lease | None
    lease_first: int

    def place(self, position: int) -> int:
        """Of a block of the prompt in the lease."""
        return self.lease_first + position - self.first

    @property
    def is_in_memory(self) -> bool:
        """Its blocks are in memory of this host."""
        return self.comes_in_order and self.tier != DISK

    @property
    def comes_in_order(self) -> bool:
        """Its blocks are in memory of this host, or being read into it, the first ones first."""
        return self.lease is not None and self.lease.has_views


class Order(enum.Enum):
    """Which blocks come first."""

    FRONT = enum.auto()
    BACK = enum.auto()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load blocks `first..end` of `span`, `unit` of them at a time where they come one after the other.

    From the back, both sides should meet after `meets_after_s`.
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
    """Seconds of one clock."""

    started_at: float
    picked_at: float | None = None
    """When one of the tiers' threads took the load on: the loads that were begun before it go first."""
    ended_at: float = 0.0


class Load:
    """`_taken` is what the tier's thread has taken on; of it, what has arrived or failed is known."""

    def __init__(
        self,
        plan: LoadPlan,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        after: Mark,
        started_at: float,
        behind: Load | None = None,
    ) -> None:
        """`hashes` and `block_ids` are those of blocks `plan.first..plan.end`; `behind` brings those before them."""
        self.plan = plan
        self.hashes = hashes
        self.block_ids = block_ids
        self.after = after
        self.times = LoadTimes(started_at)
        self._behind = behind
        self.copies: list[Copies] = []
        self.lacks_room = False
        """There was no host memory for it to pass through."""
        self.front = plan.first
        """The engine computes, or has computed, what lies before."""
        self._lock = threading.Lock()
        start = plan.first if plan.order is Order.FRONT else plan.end
        self._taken = (start, start)
        self._num_arrived = 0
        self._is_abandoned = False
        self._is_submitted = False
        self._is_over = False

    # --- the tier's thread -----------------------------------------------------------------------------------------

    def take(self, count: int) -> tuple[int, int]:
        """The next blocks to bring, at most `count`: positions in the prompt. None are left when both are equal."""
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
        """Let `begin` copy into the device's blocks for `first..end`; None, and nothing is written, if it is too late.

        Fewer may have come than were taken: with `first..end` the end of what was taken on, or its beginning.
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
        """The tier's thread does nothing more."""
        with self._lock:
            self._is_over = True

    # --- the engine's thread ---------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """It was begun behind another: how long it took says little of its tier."""
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
        """Every block is in this host's memory, and the device has been told to copy it."""
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
        """The engine computes up to `count` blocks at its front; how many."""
        with self._lock:
            count = max(0, min(count, self._open_end() - self.front))
            self.front += count
            return count

    @property
    def has_met(self) -> bool:
        """From the back: all before what has arrived is computed, and nothing is on its way."""
        with self._lock:
            return (self._is_over or self._is_abandoned) and self.front >= self._arrived_first()

    def abandon(self) -> list[Copies]:
        """Write no more. What was handed to the device is there once the returned copies are done."""
        with self._lock:
            self._is_abandoned = True
            return list(self.copies)

    def arrived(self) -> tuple[int, int]:
        """The blocks that are there, or will be once `copies` are done."""
        with self._lock:
            if self.plan.order is Order.FRONT:
                return self.plan.first, self.plan.first + self._num_arrived
            return self._arrived_first(), self.plan.end

    def _arrived_first(self) -> int:
        return self.plan.end - self._num_arrived

    def _open_end(self) -> int:
        """Up to here nobody but the engine brings anything. From the front, everything is the tier's to bring."""
        if self.plan.order is Order.FRONT:
            return self.front
        if self._is_over or self._is_abandoned:
            return self._arrived_first()
        return self._taken[0]
