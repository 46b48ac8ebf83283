"""How far back in a trace each prompt was last used: what LRU hits at every size, in one pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.simulate.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Use:
    """A request of a trace. `runs` are its leading blocks that were asked for before, from the first on.

    A run of `count` blocks was last used when `begin` other blocks had not been used since: it takes a cache of more
    than `begin` blocks to hit its first, and of `begin + count` to hit all of it.
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
    """Counts of blocks by the request that used them last, summed as a Fenwick tree."""

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
        """Blocks that were last used by later requests."""
        position, earlier = request + 1, 0
        while position:
            earlier += self._sums[position]
            position -= position & -position
        return self._total - earlier


def uses_of(requests: Sequence[TracedRequest]) -> list[Use]:
    """In order of arrival, as the requests have to be. A prompt is used from its end to its beginning."""
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
    """Blocks that would have to be kept to forget nothing."""
    return len({number for request in requests for number in request.hashes})


def block_tokens_of(requests: Iterable[TracedRequest]) -> int:
    """Tokens per block: exactly, if prompts are whole blocks, else the power of two that is closest.

    A trace may count a partial block at a prompt's end or leave it out. Raises `ConfigError` if no request says.
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
