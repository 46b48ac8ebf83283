"""Finds how far back in a trace each prompt was last used, which gives LRU's hits at every size in one pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.simulate.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Use:
    """A request of a trace. `runs` are its leading blocks that were requested before, from the first on.

    Since the last use of a run of `count` blocks, `begin` other blocks were used: a cache needs more than `begin`
    blocks to hit the run's first block, and `begin + count` to hit all of it.
    """

    arrived_s: float
    tokens: int
    num_blocks: int
    runs: tuple[tuple[int, int], ...]

    def hit_blocks(self, cache_blocks: int) -> int:
        """The leading blocks that are resident in a cache of this size."""
        num_hit = 0
        for begin, count in self.runs:
            found = min(count, max(0, cache_blocks - begin))
            num_hit += found
            if found < count:
                break
        return num_hit


class _LaterUses:
    """Counts of blocks by the request that used them last, in a Fenwick tree."""

    def __init__(self, num_requests: int) -> None:
        self._sums = [0] * (num_requests + 1)
        self._total = 0

    def add(self, request: int, count: int) -> None:
        self._total += count
        position = request + 1
        while position < len(self._sums):
            self._sums[position] += count
            position += position & -position

    def after(self, request: int) -> int:
        """The number of blocks whose last use was by a later request."""
        position, earlier = request + 1, 0
        while position:
            earlier += self._sums[position]
            position -= position & -position
        return self._total - earlier


def uses_of(requests: Sequence[TracedRequest]) -> list[Use]:
    """The uses of `requests`, which must be in the order of arrival. A prompt is used from its end to its beginning."""
    last_used: dict[int, int] = {}
    later = _LaterUses(len(requests))
    uses = []
    for number, request in enumerate(requests):
        hashes = dict.fromkeys(request.hashes, number)
        counts = Counter(map(last_used.get, hashes))
        runs = []
        for before, count in counts.items():  # in the prompt's order: the first block is the most recently used
            if before is None:
                break
            runs.append((later.after(before), count))
        for before, count in counts.items():
            if before is not None:
                later.add(before, -count)
        later.add(number, len(hashes))
        last_used.update(hashes)
        uses.append(Use(request.arrived_s, request.input_length, len(request.hashes), tuple(runs)))
    return uses


def num_distinct(requests: Iterable[TracedRequest]) -> int:
    """The number of distinct blocks: the size of a cache that never evicts."""
    return len({number for request in requests for number in request.hashes})


def block_tokens_of(requests: Iterable[TracedRequest]) -> int:
    """Tokens per block: exact if all prompts are whole blocks, else the nearest power of two.

    A trace may count a partial block at a prompt's end or leave it out. Raises `ConfigError` if no request has blocks.
    """
    num_tokens = num_blocks = 0
    exact = set()
    for request in requests:
        if request.hashes and request.input_length:
            num_tokens += request.input_length
            num_blocks += len(request.hashes)
            exact.add(request.input_length / len(request.hashes))
    if not num_blocks:
        raise ConfigError("the trace has no request with blocks: there is nothing to plan from")
    ratio = num_tokens / num_blocks
    return int(ratio) if exact == {int(ratio)} else 1 << max(0, round(math.log2(ratio)))
