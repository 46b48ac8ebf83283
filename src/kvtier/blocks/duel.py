"""Which rule evicts: LRU, age per use or worth. What the others would have kept is simulated beside it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.blocks.ages import Rule
from kvtier.blocks.candidates import Candidates
from kvtier.blocks.run import Run
from kvtier.blocks.shadows import AgeShadow, Shadow, WorthShadow

_WINDOW = 64
"""In capacities of requested blocks: how far back the record reaches."""
_MIN_CAPACITY = 128
_AHEAD = 0.001
_DEVIATIONS = 2.0
_order = operator.attrgetter("order")


class Duel:
    """`rule` is in force, LRU at first. The other two have shadows: counts of blocks by run, but no blocks.

    A rule takes over when its shadow leads in hits by a tenth of a percent of the requested blocks, without the prompt
    that changed its lead most. That is enough for age per use to replace LRU, and to end the rule of worth. Worth, and
    LRU in place of age per use, must lead by more than chance explains as well: by two standard deviations of the
    changes by the other prompts. So in traffic that is too short to tell them apart, LRU rules.
    """

    def __init__(self, candidates: Candidates[Any], clock: Callable[[], float], *, declines: bool) -> None:
        self.rule = Rule.LRU
        self._candidates = candidates
        self._clock = clock
        self._declines = declines
        self._others = {rule: _Contender(self._shadow(rule)) for rule in Rule if rule is not self.rule}
        self._num_hits = 0
        self._num_asked = 0
        self._seen = 0.0

    def hit(self, run: Run[Any], count: int) -> None:
        """The next `count` blocks of a prompt, those of `run`, were hits."""
        self._num_hits += count
        self._num_asked += count
        for other in self._others.values():
            other.hit(run, count)

    def missed(self, run: Run[Any] | None, count: int) -> None:
        """The last `count` blocks of a prompt were misses. If they continue `run`, its end may have been evicted."""
        self._num_asked += count
        if run is not None:
            for other in self._others.values():
                other.missed(run, count)

    def moved(self, run: Run[Any], count: int) -> None:
        """`count` blocks of `run` move to another run without having been requested."""
        for other in self._others.values():
            other.carry(run, count)

    def use(self, runs: Sequence[tuple[Run[Any], int]], capacity: int) -> None:
        """These runs are now a prompt, the newest one, with so many blocks each, stored or not. Decides which rules."""
        now = self._clock()
        for other in self._others.values():
            other.use(runs, capacity, now)
        if self._num_asked:
            self._settle(capacity)

    def _settle(self, capacity: int) -> None:
        self._seen += self._num_asked
        for other in self._others.values():
            other.settle(self._num_hits)
            if self.rule is not Rule.WORTH:
                other.lead = max(0.0, other.lead)  # a deficit of the past keeps no rule from a try
        self._num_asked = self._num_hits = 0
        ahead = [rule for rule, other in self._others.items() if other.lead > self._needed(rule)]
        if ahead:
            self._hand_over(ahead[0])
        if self._seen > _WINDOW * max(capacity, _MIN_CAPACITY):
            self._seen /= 2
            for other in self._others.values():
                other.forget_half()

    def _needed(self, rule: Rule) -> float:
        """The lead with which another rule takes over."""
        other = self._others[rule]
        limit = _AHEAD * self._seen + other.largest
        if rule is Rule.AGE_PER_USE or self.rule is Rule.WORTH:
            return limit
        return max(limit, other.largest + _DEVIATIONS * other.deviation)

    def _hand_over(self, rule: Rule) -> None:
        old, self.rule = self.rule, rule
        replaced = self._others[old] = self._others.pop(rule)  # what one gains over the other, the other loses
        gained = replaced.lead
        for other in self._others.values():
            other.lead -= gained
        replaced.lead = self._needed(old) / 2 if rule is Rule.WORTH else 0.0
        replaced.shadow = self._shadow(old)
        for run in sorted(self._candidates.runs, key=_order):
            replaced.shadow.add(run, run.num_live)

    def _shadow(self, rule: Rule) -> Shadow:
        if rule is Rule.WORTH:
            return WorthShadow(self._candidates.model, declines=self._declines)
        return AgeShadow(rule)


class _Contender:
    """A shadow, its hits since they were last compared, its `lead` over the cache, and the `largest` change of that."""

    def __init__(self, shadow: Shadow) -> None:
        self.lead = 0.0
        self.largest = 0.0
        self._variance = 0.0
        self.shadow = shadow
        self._num_hits = 0
        self._num_behind = 0
        self._num_carried = 0
        self._has_gap = False

    def hit(self, run: Run[Any], count: int) -> None:
        taken = self.shadow.take(run, count)
        self._num_carried += taken
        if not self._has_gap:  # no match gets past blocks that the shadow lacks
            self._num_hits += taken
        self._has_gap |= taken < count

    def missed(self, run: Run[Any], count: int) -> None:
        taken = self.shadow.take(run, max(0, min(self.shadow.size_of(run) - run.size, count)))
        self._num_carried += taken
        self._num_behind += taken

    def carry(self, run: Run[Any], count: int) -> None:
        self._num_carried += self.shadow.take(run, count)

    def use(self, runs: Sequence[tuple[Run[Any], int]], capacity: int, now: float) -> None:
        num_new = max(0, sum(count for _, count in runs) - self._num_carried)
        for run, count in reversed(runs):
            self.shadow.use(run, count, min(num_new, count), capacity, now)
            num_new -= min(num_new, count)
        self._num_carried = 0

    def settle(self, num_hits: int) -> None:
        """A prompt of which the cache had `num_hits` blocks is over."""
        change = self._num_hits + (0 if self._has_gap else self._num_behind) - num_hits
        self._num_hits = self._num_behind = 0
        self._has_gap = False
        self.lead += change
        self.largest = max(self.largest, abs(change))
        self._variance += change * change

    @property
    def deviation(self) -> float:
        """The standard deviation of the lead, without its largest change."""
        return math.sqrt(max(0.0, self._variance - self.largest * self.largest))

    def forget_half(self) -> None:
        self.lead /= 2
        self.largest /= 2
        self._variance /= 2
