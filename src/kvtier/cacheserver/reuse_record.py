"""A sampled record of requested prompts, within 2 MiB: the hits that a cache of any size would have had.

It models LRU eviction. A prompt hits its leading resident blocks, and its blocks are used from the end to the
beginning. So a block is always used after all blocks that follow it, in any prompt, and outlives them: the leading
resident blocks of a prompt are all of its resident blocks. Therefore blocks can be sampled one by one, as in SHARDS,
whatever prompts they belong to.

The first block of a prompt is counted exactly if the record knows it: sampling would count a block that every prompt
begins with far too much, or not at all.

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
"""Most sampled blocks per request, on average."""
_LOOK_EVERY = 32
"""Requests between checks of that average."""
_MAX_STEPS = 3
"""Most times that one check lowers the share: a few long prompts must not reduce the sample to almost nothing."""
_FADE_REQUESTS = 1 << 17
"""Requests after which the weight of all earlier ones is halved."""


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """A summary of the record. Each of `points` pairs a cache's bytes with the share of prompt tokens that it hits.

    `sampled_share` is the share of blocks in the sample, `seconds` the time since the first request.
    """

    num_requests: int
    asked_tokens: int
    asked_bytes: int
    seconds: float
    sampled_share: float
    points: list[tuple[int, float]]


class _Estimate:
    """Hits of prompt tokens by size: exact for known first blocks, estimated from the sample for the others."""

    def __init__(self) -> None:
        self.first_hits = HitCurve()
        self.first_tokens = 0.0
        self.sampled_hits = HitCurve()
        self.sampled_tokens = 0.0
        self.other_tokens = 0.0
        """The tokens that the sample stands for."""

    def fade(self) -> None:
        """Halve the weight of everything recorded so far."""
        self.first_hits.fade()
        self.sampled_hits.fade()
        self.first_tokens /= 2
        self.sampled_tokens /= 2
        self.other_tokens /= 2

    def points(self, max_units: int) -> list[tuple[float, float]]:
        """Sizes up to `max_units`, each with the share of tokens that hit at that size."""
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
    """The record of one server, over all its namespaces. Sizes are in units of `unit_bytes`, up to `max_units`."""

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
        """Record a prompt's lookup: count hits for its blocks, then mark them as used.

        Blocks that miss are assumed to be stored afterwards.
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
        """Record that blocks were stored: those never looked up, such as an answer's, count as used now.

        The others keep their recency: prompts are stored from the beginning on, yet their beginning must outlive
        their end.
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
        """Add the prompt's hits to the estimate, by how much was used since the last use of its blocks."""
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
        """Every few requests, sample less if they have many sampled blocks, and let old requests fade."""
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
