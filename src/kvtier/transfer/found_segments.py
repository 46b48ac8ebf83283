"""Segments of one prompt that were found in part, and are offered whole once the rest is computed. No torch.

What is found is not computed, and what is not computed is not offered: a tier that keeps whole segments would never see
the beginning of one in which a prompt parts from an earlier one. The engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.tiers.tier import SegmentTier

_MAX_LOST = 4
"""Of segments that were found whole, and that the tier is known to have lost, so many are offered at a time."""


class FoundSegments:
    """For `tier`; without one, nothing is noted and nothing due."""

    __slots__ = ("_is_part", "_tier")

    def __init__(self, tier: SegmentTier | None) -> None:
        self._tier = tier
        self._is_part: dict[int, bool] = {}
        """By the number of a segment in the prompt: only a part of it was found."""

    def note(self, first: int, end: int) -> None:
        """Blocks `first..end` of the prompt were found."""
        if self._tier is None or first >= end:
            return
        size = self._tier.segment_blocks
        for number in range(first // size, -(-end // size)):
            is_part = first > number * size or end < (number + 1) * size
            self._is_part[number] = is_part or self._is_part.get(number, False)

    def take(self, hashes: Sequence[BlockHash], num_full: int) -> list[tuple[int, int]]:
        """The blocks, first and end, of each segment that is due: all of it is full by now, and the tier lacks it.

        Of one that was found whole the tier must know that; of another it is enough that nothing is known. A segment is
        due once.
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
        """The prompt has no blocks any more."""
        self._is_part.clear()
