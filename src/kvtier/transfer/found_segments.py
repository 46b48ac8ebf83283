"""Segments of one prompt that were hits only in part, and are offered whole once the rest is computed. No torch.

Hits are not computed, and only computed blocks are offered. So a tier that keeps whole segments would never be offered
the first part of a segment in which a prompt diverges from an earlier one. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.tiers.tier import SegmentTier

_MAX_LOST = 4
"""Limit on segments offered at once that were whole hits, but which the tier is known to have lost."""


class FoundSegments:
    """Records segments for `tier`; without a tier, it stays empty."""

    __slots__ = ("_is_part", "_tier")

    def __init__(self, tier: SegmentTier | None) -> None:
        self._tier = tier
        self._is_part: dict[int, bool] = {}
        """By segment number in the prompt: whether only a part of it was a hit."""

    def note(self, first: int, end: int) -> None:
        """Blocks `first..end` of the prompt were hits."""
        if self._tier is None or first >= end:
            return
        size = self._tier.segment_blocks
        for number in range(first // size, -(-end // size)):
            is_part = first > number * size or end < (number + 1) * size
            self._is_part[number] = is_part or self._is_part.get(number, False)

    def take(self, hashes: Sequence[BlockHash], num_full: int) -> list[tuple[int, int]]:
        """The blocks (first, end) of each segment to offer now: all its blocks are full, and the tier lacks it.

        A segment that was a whole hit is due only if the tier knows that it lacks it; any other also if the tier does
        not know. Each segment is due once.
        """
        if self._tier is None or not self._is_part:
            return []
        size, num_full = self._tier.segment_blocks, min(num_full, len(hashes))
        whole = [number for number in self._is_part if (number + 1) * size <= num_full]
        if not whole:
            return []
        are_there = self._tier.has_segments([hashes[(number + 1) * size - 1] for number in whole])
        due: list[int] = []
        lost: list[int] = []
        for number, is_there in zip(whole, are_there, strict=True):
            if self._is_part.pop(number):
                due += [] if is_there else [number]
            elif is_there is False:
                lost.append(number)
        return [(number * size, (number + 1) * size) for number in lost[:_MAX_LOST] + due]

    def clear(self) -> None:
        """The prompt has given up its blocks."""
        self._is_part.clear()
