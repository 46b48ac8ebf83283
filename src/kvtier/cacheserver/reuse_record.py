"""What a cache of any size would have hit of the prompts that were asked for: a sampled record within 2 MiB.

It says what LRU eviction would do. A prompt hits its leading resident blocks, and is used from its end to its
beginning. So a block is always used after all that follow it, in any prompt, and outlives them: the leading resident
blocks of a prompt are all of its resident blocks. Therefore blocks can be sampled one by one, as SHARDS does, whatever
prompts they are part of.

The first block of a prompt is counted by itself if the record knows it: of a block that every prompt begins with, a
sample would make far too much, or nothing.

Thread-safe, with a short lock of its own under which no other is taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.blocks.hashing import HASH_BYTES
from kvtier.cacheserver.hit_curve import HitCurve, size_at
from kvtier.cacheserver.recent_blocks import RecentBlocks, key_of

_USUAL_SAMPLED = 64
"""Sampled blocks of a request, on average, at most."""
_LOOK_EVERY = 32
"""Requests after which that average is looked at."""
_MAX_STEPS = 3
"""Times that the share falls at once: a few long prompts are no reason to look at next to nothing."""
_FADE_REQUESTS = 1 << 17
"""Requests after which those before them count half."""


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """What was recorded; `points` are pairs of a cache's bytes and the share of prompt tokens that it hits.

    `sampled_share` is the share of blocks that is looked at, `seconds` the time since the first request.
    """

    num_requests: int
    asked_tokens: int
    asked_bytes: int
    seconds: float
    sampled_share: float
    points: list[tuple[int, float]]


class _Estimate:
    """Hits of prompt tokens by size: those of known first blocks as they are, those of others from a sample."""

    def __init__(self) -> None:
        self.first_hits = HitCurve()
        self.first_tokens = 0.0
        self.sampled_hits = HitCurve()
        self.sampled_tokens = 0.0
        self.other_tokens = 0.0
        """What the sample stands for."""

    def fade(self) -> None:
        """What was noted so far counts half as much from now on."""
        self.first_hits.fade()
        self.sampled_hits.fade()
        self.first_tokens /= 2
        self.sampled_tokens /= 2
        self.other_tokens /= 2

    def points(self, max_units: int) -> list[tuple[float, float]]:
        """Sizes up to `max_units`, and the share of tokens that hits there."""
        asked = self.first_tokens + self.other_tokens
        if not asked:
            return []
        scale = self.other_tokens / self.sampled_tokens if self.sampled_tokens else 0.0
        highest = 0.0
        points = []
        hits = zip(self.first_hits.hits(), self.sampled_hits.hits(), strict=True)
        for position, (first_hits, sampled_hits) in enumerate(hits):
            if size_at(position) > max_units:
                break
            highest = min(1.0, max(highest, (first_hits + scale * sampled_hits) / asked))
            points.append((size_at(position), highest))
        return points


class ReuseRecord:
    """Of one server, over all its namespaces. Sizes are counted in units of `unit_bytes`, up to `max_units`."""

    def __init__(self, unit_bytes: int, max_units: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit_bytes = unit_bytes
        self._max_units = max_units
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks = RecentBlocks(max_units)
        self._estimate = _Estimate()
        self._num_requests = 0
        self._num_sampled = 0
        self._asked_tokens = 0
        self._asked_units = 0
        self._began_at: float | None = None

    def note_asked(self, hashes: bytes, block_units: int, block_tokens: int) -> None:
        """A prompt was asked for. Its blocks, a run of hashes, are counted, and then used.

        Blocks that miss are taken to be stored.
        """
        num_blocks = len(hashes) // HASH_BYTES
        if not num_blocks:
            return
        with self._lock:
            if self._began_at is None:
                self._began_at = self._clock()
            self._num_requests += 1
            self._asked_tokens += num_blocks * block_tokens
            self._asked_units += num_blocks * block_units
            sampled = self._blocks.sample(hashes)
            first = key_of(hashes, 0)
            self._count(first, sampled, num_blocks, block_units, block_tokens)
            self._blocks.use(sampled, block_units, first)
            self._look_at_cost(len(sampled))

    def note_stored(self, hashes: bytes, block_units: int) -> None:
        """Blocks were stored. Those that nobody has asked for, an answer's for instance, are used now.

        The others keep their place: prompts are stored from their beginnings on, and outlived by them all the same.
        """
        with self._lock:
            if sampled := self._blocks.unknown(self._blocks.sample(hashes)):
                self._blocks.use(sampled, block_units)

    def read(self) -> RecordedUse:
        with self._lock:
            return RecordedUse(
                self._num_requests,
                self._asked_tokens,
                self._asked_units * self._unit_bytes,
                0.0 if self._began_at is None else self._clock() - self._began_at,
                1 / self._blocks.scale,
                [(int(size * self._unit_bytes), share) for size, share in self._estimate.points(self._max_units)],
            )

    # --- private, under the lock -----------------------------------------------------------------------------------

    def _count(self, first: bytes, sampled: list[bytes], num_blocks: int, block_units: int, block_tokens: int) -> None:
        """Note how much was used since the last use of the prompt's blocks."""
        estimate = self._estimate
        units_since = self._blocks.units_since_first(first)
        if units_since is not None:
            estimate.first_hits.add(units_since, units_since + block_units, block_tokens)
            estimate.first_tokens += block_tokens
            num_blocks -= 1
            if sampled and sampled[0] == first:
                sampled = sampled[1:]
        estimate.other_tokens += num_blocks * block_tokens
        sampled_units, sampled_tokens = (size * self._blocks.scale for size in (block_units, block_tokens))
        estimate.sampled_tokens += len(sampled) * sampled_tokens
        for begin, count in self._blocks.units_since(sampled):
            estimate.sampled_hits.add(begin, begin + count * sampled_units, count * sampled_tokens)

    def _look_at_cost(self, num_sampled: int) -> None:
        """Once in a while: sample less if requests have many sampled blocks, and let old requests fade."""
        self._num_sampled += num_sampled
        if self._num_requests % _LOOK_EVERY:
            return
        usual = self._num_sampled / _LOOK_EVERY
        for _ in range(_MAX_STEPS):
            if usual > _USUAL_SAMPLED:
                self._blocks.sample_less()
                usual *= 0.75
        self._num_sampled = 0
        if self._num_requests % _FADE_REQUESTS == 0:
            self._estimate.fade()
