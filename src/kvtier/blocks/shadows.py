"""What other policies would have kept, run by run: caches of counts, without any blocks. A run loses its end first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from kvtier.blocks.ages import Rule, oldest
from kvtier.blocks.candidates import Candidates
from kvtier.blocks.reuse_model import ReuseModel
from kvtier.blocks.run import MAX_USES, Run

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

    def add(self, run: Run[Any], count: int) -> None:
        """Make `run` with `count` more blocks the newest."""
        ...

    def use(self, run: Run[Any], count: int, num_new: int, capacity: int, now: float) -> None:
        """As `add`, then evict what is over `capacity`. `run` did not have the last `num_new` of the blocks before."""
        ...


class AgeShadow:
    """The oldest first, by either rule of age."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._by_uses: list[OrderedDict[Run[Any], int]] = [OrderedDict() for _ in range(MAX_USES + 1)]
        if rule is Rule.LRU:
            self._by_uses = self._by_uses[:1] * (MAX_USES + 1)
        self._num_blocks = 0

    def size_of(self, run: Run[Any]) -> int:
        return self._by_uses[run.num_uses].get(run, 0)

    def take(self, run: Run[Any], count: int) -> int:
        sizes = self._by_uses[run.num_uses]
        size = sizes.get(run, 0)
        if size > count:
            sizes[run] = size - count
        elif size:
            count = size
            del sizes[run]
        else:
            return 0
        self._num_blocks -= count
        return count

    def add(self, run: Run[Any], count: int) -> None:
        sizes = self._by_uses[run.num_uses]
        sizes[run] = sizes.get(run, 0) + count
        sizes.move_to_end(run)
        self._num_blocks += count

    def use(self, run: Run[Any], count: int, num_new: int, capacity: int, now: float) -> None:
        if count:
            self.add(run, count)
        while self._num_blocks > capacity:
            self.take(self._oldest(now), self._num_blocks - capacity)

    def _oldest(self, now: float) -> Run[Any]:
        if self._rule is Rule.LRU:
            return next(iter(self._by_uses[0]))
        return oldest((next(iter(sizes)) for sizes in self._by_uses if sizes), self._rule, now)


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
