"""Which blocks a server writes to its disk: all committed blocks or only reused ones, within a budget of writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

StoreOn: TypeAlias = Literal["commit", "reuse"]

DAY_S = 86_400.0
_BURST_S = 3600.0
"""Budget left unused may still be used this much later."""
_KEPT_PART = 2
"""One byte in this many of the burst is reserved for blocks worth more than the others."""


class WriteBudget:
    """At most `bytes_per_day` in the long run, in bursts of an hour's writes. Thread-safe.

    A write may exceed what is left: later writes then wait until the budget is positive again.
    """

    def __init__(self, bytes_per_day: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_day / DAY_S
        self._burst_bytes = self._bytes_per_s * _BURST_S
        self._clock = clock
        self._lock = threading.Lock()
        self._left = self._burst_bytes
        self._counted_at = clock()

    @property
    def left_bytes(self) -> float:
        """Negative after a write that exceeded the budget."""
        with self._lock:
            self._fill()
            return self._left

    @property
    def is_short(self) -> bool:
        """The rest of the budget is reserved for blocks worth more than the others."""
        return self.left_bytes < self._burst_bytes / _KEPT_PART

    @property
    def is_spent(self) -> bool:
        return self.left_bytes <= 0

    def spend(self, num_bytes: int) -> None:
        """Take `num_bytes` from the budget; a negative number returns bytes that were not written after all."""
        with self._lock:
            self._fill()
            self._left -= num_bytes

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._burst_bytes, self._left + (now - self._counted_at) * self._bytes_per_s)
        self._counted_at = now


class DiskAdmission:
    """Decides which blocks are written to a disk that stores at `stores_on`, with an optional `budget`.

    While the budget is short, a new block is withheld until it is reused or about to leave memory. Once the budget is
    spent, every block is withheld. With `stores_on` "reuse", only reused blocks are written.
    """

    def __init__(self, stores_on: StoreOn, budget: WriteBudget | None = None) -> None:
        self._stores_on = stores_on
        self.budget = budget
        self.num_withheld = 0

    def takes_new(self, num_blocks: int) -> bool:
        """Whether blocks just committed are written now; blocks withheld only for the budget are counted."""
        if self._stores_on != "commit":
            return False
        if self.budget is not None and self.budget.is_short:
            self.num_withheld += num_blocks
            return False
        return True

    @property
    def looks_at_reused(self) -> bool:
        """Blocks in memory may have been withheld, and are worth a write once they are reused."""
        return self._stores_on == "reuse" or self.budget is not None

    @property
    def looks_at_leaving(self) -> bool:
        return self._stores_on == "commit" and self.budget is not None

    @property
    def takes_valued(self) -> bool:
        """Whether blocks that are reused or about to leave memory are written now."""
        return self.budget is None or not self.budget.is_spent

    def levels(self) -> dict[str, float]:
        """Metrics of the budget; empty without one."""
        if self.budget is None:
            return {}
        return {"disk_withheld_blocks": self.num_withheld, "disk_budget_left_bytes": max(0.0, self.budget.left_bytes)}

    def spend(self, num_bytes: int) -> None:
        if self.budget is not None:
            self.budget.spend(num_bytes)
