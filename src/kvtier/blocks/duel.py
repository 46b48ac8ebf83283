"""Compares LRU with another policy: which of them would have had more recent hits, run by run, without any blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvtier.blocks.run import Run

_WINDOW = 64
_MIN_WAIT, _MAX_WAIT = 2, 64
"""In capacities of requested blocks: how far back the record reaches, and how long LRU rules at a time."""
_AHEAD = 0.002
_MIN_CAPACITY = 128


class Duel:
    """Keeps the runs that LRU would have, with the blocks it would have of each. A run loses its end first.

    `lru_rules` at first, until two capacities of blocks were requested, while the other policy learns. Later LRU takes
    over when it leads by more than a fifth of a percent of the requested blocks plus the largest change by one prompt,
    and rules until the other policy is due for another try. A try that fails doubles the wait for the next one; a try
    that gets ahead of LRU resets the wait. So a policy that is worse than LRU costs less and less.
    """

    def __init__(self) -> None:
        self.lru_rules = True
        self._runs: OrderedDict[Run[Any], None] = OrderedDict()
        self._num_blocks = 0
        self._capacity = _MIN_CAPACITY
        self._lead = 0.0
        self._largest = 0.0
        self._seen = 0.0
        self._wait = _MIN_WAIT
        self._waited = 0

    def hit(self, run: Run[Any], count: int) -> None:
        """`count` blocks of `run` were hits; the record tells how many of them LRU would have had."""
        of_lru = min(run.lru_size, count)
        self._take(run, of_lru)
        self._count(of_lru - count, count)

    def moved(self, run: Run[Any], count: int) -> None:
        """`count` blocks of `run` move to another run without having been requested."""
        self._take(run, min(run.lru_size, count))

    def missed(self, run: Run[Any] | None, count: int) -> None:
        """`count` blocks that continue `run` were misses, for instance because the run's end was evicted."""
        of_lru = 0 if run is None else max(0, min(run.lru_size - run.size, count))
        if run is not None:
            self._take(run, of_lru)
        self._count(of_lru, count)

    def use(self, run: Run[Any], count: int, capacity: int) -> None:
        """LRU would have `count` more blocks in `run`, now the newest, and would evict the oldest for them."""
        runs = self._runs
        self._capacity = max(capacity, _MIN_CAPACITY)
        run.lru_size += count
        runs[run] = None
        runs.move_to_end(run)
        self._num_blocks += count
        while self._num_blocks > capacity and runs:
            oldest = next(iter(runs))
            self._take(oldest, min(oldest.lru_size, self._num_blocks - capacity))

    def _take(self, run: Run[Any], count: int) -> None:
        run.lru_size -= count
        self._num_blocks -= count
        if not run.lru_size:
            self._runs.pop(run, None)

    def _count(self, lead: int, count: int) -> None:
        self._seen += count
        self._largest = max(self._largest, abs(lead))
        limit = _AHEAD * self._seen + self._largest
        if self.lru_rules:
            self._waited += count
            if self._waited > self._wait * self._capacity:
                self.lru_rules = False
                self._lead = limit / 2
            return
        self._lead += lead
        if self._lead > limit:
            self.lru_rules, self._waited = True, 0
            self._wait = min(2 * self._wait, _MAX_WAIT)
        elif self._lead < 0:
            self._wait = _MIN_WAIT
        if self._seen > _WINDOW * self._capacity:
            self._seen /= 2
            self._lead /= 2
            self._largest /= 2
