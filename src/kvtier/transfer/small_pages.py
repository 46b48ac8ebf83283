"""Pages smaller than a block: several places make up one block of the device. No torch.

Everything above a copier counts blocks, one number each. Here, that number packs the places of a block's parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copier import Copier, Copies, Mark

_PLACE_BITS = 64


def packed(places: Sequence[int], parts_per_block: int) -> Sequence[int]:
    """One number for each block; `places` lists the places of one block after another."""
    if parts_per_block == 1:
        return places
    return [
        sum(place << part * _PLACE_BITS for part, place in enumerate(places[first : first + parts_per_block]))
        for first in range(0, len(places), parts_per_block)
    ]


class SmallPageCopier:
    """A `Copier` whose places are packed numbers. Owns `copier`."""

    def __init__(self, copier: Copier, parts_per_block: int) -> None:
        self._copier = copier
        self._shifts = range(0, parts_per_block * _PLACE_BITS, _PLACE_BITS)

    @property
    def is_whole(self) -> bool:
        return self._copier.is_whole

    def mark(self) -> Mark:
        return self._copier.mark()

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        return self._copier.load(arena, offsets, self._unpacked(places), after)

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        return self._copier.store(self._unpacked(places), arena, offsets, after)

    def adopt(self, arena: MappedArena) -> None:
        self._copier.adopt(arena)

    def close(self) -> None:
        self._copier.close()

    def _unpacked(self, numbers: Sequence[int]) -> list[int]:
        mask = (1 << _PLACE_BITS) - 1
        return [number >> shift & mask for number in numbers for shift in self._shifts]
