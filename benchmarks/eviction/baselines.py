"""Other ways to choose what to keep, as plain caches of block numbers: ARC, S3-FIFO, and one that knows the future.

Each gets a request's blocks from the last to the first, as LRU does, and returns the number of leading blocks present.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from kvtier.simulate.trace import BLOCK_TOKENS, TracedRequest


class Cache(Protocol):
    """Holds block numbers."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int) -> None: ...


def hit_rate(requests: Sequence[TracedRequest], cache: Cache) -> float:
    """The share of prompt tokens that were hits."""
    hits = 0
    for request in requests:
        leading = 0
        for block in request.hashes:
            if block not in cache:
                break
            leading += 1
        hits += min(leading * BLOCK_TOKENS, request.input_length)
        for block in reversed(request.hashes):
            cache.use(block)
    return hits / max(1, sum(request.input_length for request in requests))


class Arc:
    """Adaptive replacement: recent against frequent blocks, balanced by hits on what either list has let go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._was_recent: OrderedDict[int, None] = OrderedDict()
        self._was_frequent: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._recent or block in self._frequent

    def use(self, block: int) -> None:
        if block in self._frequent:
            self._frequent.move_to_end(block)
            return
        if block in self._recent:
            del self._recent[block]
        elif block in self._was_recent:
            step = max(1.0, len(self._was_frequent) / len(self._was_recent))
            self._target = min(self._capacity, self._target + step)
            self._replace(is_from_frequent=False)
            del self._was_recent[block]
        elif block in self._was_frequent:
            step = max(1.0, len(self._was_recent) / len(self._was_frequent))
            self._target = max(0.0, self._target - step)
            self._replace(is_from_frequent=True)
            del self._was_frequent[block]
        else:
            self._make_room()
            self._recent[block] = None
            return
        self._frequent[block] = None

    def _make_room(self) -> None:
        seen_once = len(self._recent) + len(self._was_recent)
        total = seen_once + len(self._frequent) + len(self._was_frequent)
        if seen_once == self._capacity:
            if len(self._recent) == self._capacity:
                self._recent.popitem(last=False)
                return
            self._was_recent.popitem(last=False)
            self._replace(is_from_frequent=False)
        elif total >= self._capacity:
            if total == 2 * self._capacity:
                self._was_frequent.popitem(last=False)
            self._replace(is_from_frequent=False)

    def _replace(self, *, is_from_frequent: bool) -> None:
        num_recent = len(self._recent)
        if num_recent and (num_recent > self._target or (is_from_frequent and num_recent == int(self._target))):
            self._was_recent[self._recent.popitem(last=False)[0]] = None
        else:
            self._was_frequent[self._frequent.popitem(last=False)[0]] = None


class S3Fifo:
    """Three queues: a tenth of the room for new blocks, the rest for those used again, and ghosts of the new ones."""

    def __init__(self, capacity: int) -> None:
        self._num_small = max(1, capacity // 10)
        self._capacity = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(3, self._uses[block] + 1)
            return
        while len(self._uses) >= self._capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)
        self._uses[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._num_small or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        while self._small:
            block = self._small.popleft()
            if self._uses[block] > 1:
                self._uses[block] = 0
                self._main.append(block)
                continue
            del self._uses[block]
            self._ghosts[block] = None
            if len(self._ghosts) > self._capacity - self._num_small:
                self._ghosts.popitem(last=False)
            return

    def _evict_main(self) -> None:
        while self._main:
            block = self._main.popleft()
            if self._uses[block]:
                self._uses[block] -= 1
                self._main.append(block)
                continue
            del self._uses[block]
            return


class Clairvoyant:
    """Evicts the block whose next use is furthest away, the new one too; later blocks of a prompt first."""

    def __init__(self, requests: Sequence[TracedRequest], capacity: int) -> None:
        self._capacity = capacity
        self._uses: dict[int, deque[int]] = {}
        time = 0
        for request in requests:
            for block in request.hashes:  # so that of two with the same next request the later one leaves first
                self._uses.setdefault(block, deque()).append(time)
                time += 1
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._end = time

    def __contains__(self, block: int) -> bool:
        return block in self._next

    def use(self, block: int) -> None:
        uses = self._uses[block]
        uses.popleft()
        self._next[block] = following = uses[0] if uses else self._end
        heapq.heappush(self._heap, (-following, block))
        while len(self._next) > self._capacity:
            when, victim = heapq.heappop(self._heap)
            if self._next.get(victim) == -when:
                del self._next[victim]
