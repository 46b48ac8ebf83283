"""The runs that may lose blocks, and which of them is worth least: the oldest of each class, and a few at random."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import Generic, TypeAlias, TypeVar

from kvtier.blocks.ages import Rule, oldest
from kvtier.blocks.reuse_model import FIRST_S, NUM_BUCKETS, NUM_CLASSES, ReuseModel
from kvtier.blocks.run import MAX_USES, Run

_NUM_SAMPLED = 16
_NUM_ADDED = 4
_NUM_KEPT = 8
"""So many of the best candidates meet so many new ones in the next comparison, if it follows at once."""
ONE_USE_S = 0.05
"""Uses closer together than this count as one: the model does not resolve shorter gaps."""

_Item = TypeVar("_Item")
Candidate: TypeAlias = tuple[float, int, int, Run[_Item]]
"""A run's worth, its order of use, and a number that no other candidate has, so that candidates can be sorted."""
_frexp = math.frexp


class Candidates(Generic[_Item]):
    """All of them have been used. `runs` are in no order; each class is in the order of its last uses."""

    def __init__(self, model: ReuseModel) -> None:
        self.model = model
        self.runs: list[Run[_Item]] = []
        self._places: dict[Run[_Item], int] = {}
        self._classes: list[OrderedDict[Run[_Item], None]] = [OrderedDict() for _ in range(NUM_CLASSES)]
        self._by_uses: list[OrderedDict[Run[_Item], None]] = [OrderedDict() for _ in range(MAX_USES + 1)]
        self._seed = 1
        self._best: list[Candidate[_Item]] = []
        self._compared_at = -math.inf
        self._num_compared = 0

    def __len__(self) -> int:
        return len(self.runs)

    def __contains__(self, run: object) -> bool:
        return run in self._places

    def add(self, run: Run[_Item], *, is_newest: bool = True) -> None:
        self._best.clear()
        self._places[run] = len(self.runs)
        self.runs.append(run)
        for runs in (self._classes[run.gap_class], self._by_uses[run.num_uses]):
            runs[run] = None
            if not is_newest:
                runs.move_to_end(run, last=False)

    def remove(self, run: Run[_Item]) -> None:
        place = self._places.pop(run)
        last = self.runs.pop()
        if last is not run:
            self.runs[place] = last
            self._places[last] = place
        del self._classes[run.gap_class][run]
        del self._by_uses[run.num_uses][run]

    def oldest(self, rule: Rule, now: float) -> Run[_Item]:
        """The oldest run by either rule of age. There must be one."""
        return oldest((next(iter(runs)) for runs in self._by_uses if runs), rule, now)

    def compare(self, now: float) -> Candidate[_Item]:
        """The candidate of least worth; of several, the oldest. There must be one.

        Evictions for one prompt compare again and again. Meanwhile worths stay the same and no runs are added: the best
        candidates of the last comparison stay, too, and only a few new ones are sampled.
        """
        best, runs = self._best, self.runs
        if best and 0 <= now - self._compared_at < ONE_USE_S:
            num_sampled = _NUM_ADDED
            added: list[Run[_Item]] = []
            while best and best[0][3] not in self._places:
                gone = best.pop(0)[3]
                added += itertools.islice(self._classes[gone.gap_class], 1)
        else:
            num_sampled = _NUM_SAMPLED
            self._compared_at = now
            best.clear()
            added = [next(iter(of_class)) for of_class in self._classes if of_class]
        seed, num_runs = self._seed, len(runs)
        for _ in range(num_sampled):
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            added.append(runs[(seed >> 8) % num_runs])
        self._seed = seed
        worths_of = self.model.worths_of
        for run in added:
            used_at: float = run.used_at  # type: ignore[assignment]
            bucket = _frexp((now - used_at) / FIRST_S)[1]  # inlined from `bucket_of`: called for every candidate
            worths = worths_of(run.gap_class)
            worth = worths[bucket if 0 <= bucket < NUM_BUCKETS else 0 if bucket < 0 else NUM_BUCKETS - 1]
            self._num_compared += 1
            best.append((worth, run.order, self._num_compared, run))
        best.sort()
        del best[_NUM_KEPT:]
        return best[0]
