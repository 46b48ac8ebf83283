"""What other policies would have kept, run by run: caches of counts, without any blocks. A run loses its end first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from kvtier.blocks.candidates import Candidates
from kvtier.blocks.reuse_model import ReuseModel
from kvtier.blocks.run import Run

_POPS_OF_ONE = 16
_POPS_SHARE = 256
"""So many blocks, or one part in this many of the capacity, leave one run before candidates are compared again."""


def pops_of_one(capacity: int) -> int:
    """How many blocks leave one run before candidates are compared again."""
    return max(_POPS_OF_ONE, capacity // _POPS_SHARE)


class Shadow(Protocol):
    """A policy's cache."""

    def size_of(self, run: Run[Any]) -> int:
        """How many blocks of `run` it has."""
        ...

    def take(self, run: Run[Any], count: int) -> int:
        """Take out up to `count` blocks of `run`. Returns how many."""
        ...

    def use(self, run: Run[Any], count: int, num_new: int, capacity: int, now: float) -> None:
        """Make `run` with `count` more blocks the newest; it did not have the last `num_new` of them before."""
        ...


class LruShadow:
    """Least recently used first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Run[Any], int] = OrderedDict()
        self._num_blocks = 0

    def size_of(self, run: Run[Any]) -> int:
        return self._sizes.get(run, 0)

    def take(self, run: Run[Any], count: int) -> int:
        size = self._sizes.get(run, 0)
        if size > count:
            self._sizes[run] = size - count
        elif size:
            count = size
            del self._sizes[run]
        else:
            return 0
        self._num_blocks -= count
        return count

    def use(self, run: Run[Any], count: int, num_new: int, capacity: int, now: float) -> None:
        if not count:
            return
        sizes = self._sizes
        sizes[run] = sizes.get(run, 0) + count
        sizes.move_to_end(run)
        self._num_blocks += count
        while self._num_blocks > capacity and sizes:
            self.take(next(iter(sizes)), self._num_blocks - capacity)


class WorthShadow:
    """Least worth first, as in `AdaptivePolicy`, with the same model. With `declines`, it stores nothing worth less."""

    def __init__(self, model: ReuseModel, *, declines: bool) -> None:
        self._declines = declines
        self._candidates: Candidates[Any] = Candidates(model)
        self._sizes: dict[Run[Any], int] = {}
        self._num_blocks = 0

    def size_of(self, run: Run[Any]) -> int:
        return self._sizes.get(run, 0)

    def take(self, run: Run[Any], count: int) -> int:
        size = self._sizes.get(run, 0)
        if size > count:
            self._sizes[run] = size - count
        elif size:
            count = size
            del self._sizes[run]
            self._candidates.remove(run)
        else:
            return 0
        self._num_blocks -= count
        return count

    def add(self, run: Run[Any], count: int) -> None:
        if run not in self._sizes:
            self._candidates.add(run)
        self._sizes[run] = self._sizes.get(run, 0) + count
        self._num_blocks += count

    def use(self, run: Run[Any], count: int, num_new: int, capacity: int, now: float) -> None:
        candidates = self._candidates
        over = self._num_blocks + count - capacity
        while over > 0 and candidates.runs:
            worth, _, _, coldest = candidates.compare(now)
            if num_new and self._declines and candidates.model.worth(run.gap_class, 0.0) < worth:
                num_declined = min(over, num_new - 1)
                count, over, num_new = count - num_declined, over - num_declined, 0
                continue
            over -= self.take(coldest, min(over, pops_of_one(capacity)))
        if count > 0:
            self.add(run, min(count, capacity))
