"""LRU against another policy: one of them rules, and what the other would have kept is simulated beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtier.blocks.candidates import Candidates
from kvtier.blocks.run import Run
from kvtier.blocks.shadows import LruShadow, Shadow, WorthShadow

_WINDOW = 64
"""In capacities of requested blocks: how far back the record reaches."""
_MIN_CAPACITY = 128
_AHEAD = 0.002
_DEVIATIONS = 2.0


class Duel:
    """`lru_rules` at first. The policy that does not rule has a shadow: counts of blocks by run, but no blocks.

    The other policy takes over from LRU once its shadow leads in hits by more than chance explains: without the prompt
    that changed the lead most, it would lead by two standard deviations of the changes by the others, and by a fifth of
    a percent of the requested blocks. LRU, whose shadow is always kept, takes over again when it leads by the latter.
    So in traffic that is too short to tell them apart, LRU rules.
    """

    def __init__(self, candidates: Candidates[Any], clock: Callable[[], float], *, declines: bool) -> None:
        self.lru_rules = True
        self._candidates = candidates
        self._clock = clock
        self._declines = declines
        self._lru = _Contender(LruShadow())
        self._other: _Contender | None = self._made_other()
        self._num_hits = 0
        self._num_asked = 0
        self._seen = 0.0
        self._largest = 0.0
        self._variance = 0.0

    def hit(self, run: Run[Any], count: int) -> None:
        """The next `count` blocks of a prompt, those of `run`, were hits."""
        self._num_hits += count
        self._num_asked += count
        self._lru.hit(run, count)
        if self._other is not None:
            self._other.hit(run, count)

    def missed(self, run: Run[Any] | None, count: int) -> None:
        """The last `count` blocks of a prompt were misses. If they continue `run`, its end may have been evicted."""
        self._num_asked += count
        if run is not None:
            self._lru.missed(run, count)
            if self._other is not None:
                self._other.missed(run, count)

    def moved(self, run: Run[Any], count: int) -> None:
        """`count` blocks of `run` move to another run without having been requested."""
        self._lru.carry(run, count)
        if self._other is not None:
            self._other.carry(run, count)

    def use(self, runs: Sequence[tuple[Run[Any], int]], capacity: int) -> None:
        """These runs are now a prompt, the newest one, with so many blocks each, stored or not. Decides who rules."""
        now = self._clock()
        self._lru.use(runs, capacity, now)
        if self._other is not None:
            self._other.use(runs, capacity, now)
        if self._num_asked:
            self._settle(capacity)

    def _settle(self, capacity: int) -> None:
        self._seen += self._num_asked
        of_lru = self._lru.gain_over(self._num_hits)
        of_other = None if self._other is None else self._other.gain_over(self._num_hits)
        self._num_asked = self._num_hits = 0
        change = of_lru if of_other is None else of_other
        self._largest = max(self._largest, abs(change))
        self._variance += change * change
        limit = _AHEAD * self._seen + self._largest
        if self._other is None:
            self._lru.lead += change
            if self._lru.lead > limit:
                self.lru_rules, self._other = True, self._made_other()
        else:
            self._other.lead = max(0.0, self._other.lead + change)
            deviation = max(0.0, self._variance - self._largest * self._largest) ** 0.5
            if self._other.lead > max(limit, self._largest + _DEVIATIONS * deviation):
                self.lru_rules, self._other = False, None
                self._lru.lead = limit / 2
        if self._seen > _WINDOW * max(capacity, _MIN_CAPACITY):
            self._seen /= 2
            self._largest /= 2
            self._variance /= 2
            self._lru.lead /= 2

    def _made_other(self) -> _Contender:
        """A shadow of the policy that has ruled so far: it has what is cached."""
        shadow = WorthShadow(self._candidates.model, declines=self._declines)
        for run in self._candidates.runs:
            shadow.add(run, run.num_live)
        return _Contender(shadow)


class _Contender:
    """A shadow, its hits since they were last compared, and its `lead` over the cache."""

    def __init__(self, shadow: Shadow) -> None:
        self.lead = 0.0
        self._shadow = shadow
        self._num_hits = 0
        self._num_behind = 0
        self._num_carried = 0
        self._has_gap = False

    def hit(self, run: Run[Any], count: int) -> None:
        taken = self._shadow.take(run, count)
        self._num_carried += taken
        if not self._has_gap:  # no match gets past blocks that the shadow lacks
            self._num_hits += taken
        self._has_gap |= taken < count

    def missed(self, run: Run[Any], count: int) -> None:
        taken = self._shadow.take(run, max(0, min(self._shadow.size_of(run) - run.size, count)))
        self._num_carried += taken
        self._num_behind += taken

    def carry(self, run: Run[Any], count: int) -> None:
        self._num_carried += self._shadow.take(run, count)

    def use(self, runs: Sequence[tuple[Run[Any], int]], capacity: int, now: float) -> None:
        num_new = max(0, sum(count for _, count in runs) - self._num_carried)
        for run, count in reversed(runs):
            self._shadow.use(run, count, min(num_new, count), capacity, now)
            num_new -= min(num_new, count)
        self._num_carried = 0

    def gain_over(self, num_hits: int) -> int:
        """How many more hits it had than the cache."""
        gain = self._num_hits + (0 if self._has_gap else self._num_behind) - num_hits
        self._num_hits = self._num_behind = 0
        self._has_gap = False
        return gain
