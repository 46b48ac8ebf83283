"""Room for blocks of any size in one range of units, with O(1) neighbours.

Every unit belongs to exactly one `Region`, free or taken, linked to the regions beside it, so a freed region joins
its neighbours at once and room left by one model serves the next. Free regions are in bins by size (two-level
segregated fit). A unit is 4 KiB in an arena that holds many block sizes, or one block in a pool of equal blocks.
Not thread-safe: the pool that owns it is its only caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar


class Region:
    """`size` units from `start`; `left` and `right` are its neighbours in the space."""

    __slots__ = ("left", "right", "size", "start")

    is_free = True

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self.left: Region | None = None
        self.right: Region | None = None


class TakenRegion(Region):
    """A region that `Space.take` returns; pools subclass it to add fields of their own."""

    __slots__ = ()

    is_free = False


_Taken = TypeVar("_Taken", bound=TakenRegion)


class Space:
    """`num_units` units. `free_units` counts those in free regions."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.free_units = 0
        self._bins: dict[int, dict[Region, None]] = {}
        self._filled_bins = 0  # bit b is set while bin b holds a region
        self._first = self._last = Region(0, num_units)
        if num_units:
            self._put(self._first)

    @classmethod
    def restored(cls, num_units: int, taken: Sequence[TakenRegion]) -> Space:
        """A space in which the regions `taken`, sorted by `start` and not overlapping, are taken already."""
        space = cls(0)
        space.num_units = num_units
        left: Region | None = None
        end = 0
        for region in taken:
            if region.start > end:
                left = space._append_free(left, end, region.start)
            space._link(left, region)
            left, end = region, region.start + region.size
        if end < num_units:
            left = space._append_free(left, end, num_units)
        if left is not None:
            space._link(left, None)
        return space

    def extend(self, num_units: int) -> None:
        """Add free units at the end."""
        last = self._last
        start = self.num_units
        self.num_units += num_units
        if last.is_free and start:
            self._remove(last)
            last.size += num_units
            self._put(last)
        else:
            self._append_free(last if start else None, start, self.num_units)

    def cut(self, num_units: int) -> None:
        """Remove the last units, which must be free."""
        last = self._last
        assert last.is_free, "units to cut off must be free"
        assert num_units <= last.size, "units to cut off must be free"
        self._remove(last)
        self.num_units -= num_units
        last.size -= num_units
        if last.size:
            self._put(last)
        elif last.left is not None:
            self._link(last.left, None)

    def has_room(self, size: int) -> bool:
        """Whether some free region has `size` units."""
        return self._find(size) is not None

    def take(self, count: int, size: int, make: Callable[[int, int], _Taken]) -> list[_Taken]:
        """Up to `count` regions of `size` units each, in as few runs of adjacent regions as possible.

        Returns fewer, possibly none, if no free region has room for another one.
        """
        taken: list[_Taken] = []
        while len(taken) < count:
            region = self._find((count - len(taken)) * size) or self._find_largest(size)
            if region is None:
                break
            self._split(region, min(count - len(taken), region.size // size), size, make, taken)
        return taken

    def replace(self, region: TakenRegion, make: Callable[[int, int], _Taken]) -> _Taken:
        """Give back `region` and take the same units again for a new region. `region` is dead afterwards."""
        taken = make(region.start, region.size)
        left, right = region.left, region.right
        taken.left, taken.right = left, right
        if left is None:
            self._first = taken
        else:
            left.right = taken
        if right is None:
            self._last = taken
        else:
            right.left = taken
        region.left = region.right = None
        return taken

    def give_back(self, region: TakenRegion) -> None:
        """Free `region` and join it with free neighbours. `region` is dead afterwards."""
        start, size, left, right = region.start, region.size, region.left, region.right
        if left is not None and left.is_free:
            self._remove(left)
            start, size, left = left.start, size + left.size, left.left
        if right is not None and right.is_free:
            self._remove(right)
            size, right = size + right.size, right.right
        region.left = region.right = None
        joined = Region(start, size)
        self._link(left, joined)
        self._link(joined, right)
        self._put(joined)

    def regions(self) -> Iterator[Region]:
        """All regions from the first unit on."""
        region: Region | None = self._first
        while region is not None:
            yield region
            region = region.right

    def regions_backwards(self) -> Iterator[Region]:
        """All regions from the last unit on."""
        region: Region | None = self._last
        while region is not None:
            yield region
            region = region.left

    def _append_free(self, left: Region | None, start: int, end: int) -> Region:
        free = Region(start, end - start)
        self._link(left, free)
        self._link(free, None)
        self._put(free)
        return free

    def _split(
        self, region: Region, count: int, size: int, make: Callable[[int, int], _Taken], into: list[_Taken]
    ) -> None:
        self._remove(region)
        left, end = region.left, region.start + count * size
        for start in range(region.start, end, size):
            taken = make(start, size)
            taken.left = left
            if left is None:
                self._first = taken
            else:
                left.right = taken
            into.append(taken)
            left = taken
        rest = region.start + region.size - end
        if rest:
            remainder = Region(end, rest)
            self._link(left, remainder)
            self._link(remainder, region.right)
            self._put(remainder)
        else:
            self._link(left, region.right)
        region.left = region.right = None

    def _link(self, left: Region | None, right: Region | None) -> None:
        if left is None:
            assert right is not None
            self._first = right
        else:
            left.right = right
        if right is None:
            assert left is not None
            self._last = left
        else:
            right.left = left

    def _put(self, region: Region) -> None:
        number = _bin_of(region.size)
        members = self._bins.get(number)
        if members is None:
            members = self._bins[number] = {}
        members[region] = None
        self._filled_bins |= 1 << number
        self.free_units += region.size

    def _remove(self, region: Region) -> None:
        number = _bin_of(region.size)
        members = self._bins[number]
        del members[region]
        if not members:
            del self._bins[number]
            self._filled_bins &= ~(1 << number)
        self.free_units -= region.size

    def _find(self, size: int) -> Region | None:
        """A free region of at least `size` units, close to the smallest such region."""
        number = _bin_of(size)
        for region in self._bins.get(number, ()):
            if region.size >= size:
                return region
        larger = self._filled_bins >> (number + 1)
        if not larger:
            return None
        return next(iter(self._bins[number + (larger & -larger).bit_length()]))

    def _find_largest(self, size: int) -> Region | None:
        """A free region from the largest bin, if it has `size` units."""
        if not self._filled_bins:
            return None
        number = self._filled_bins.bit_length() - 1
        if number == _bin_of(size):
            return self._find(size)
        return next(iter(self._bins[number])) if number > _bin_of(size) else None


def _bin_of(size: int) -> int:
    """Four bins for each power of two: sizes in one bin differ by less than a quarter."""
    bits = size.bit_length()
    if bits <= 3:
        return size
    return (bits - 1) * 4 + ((size >> (bits - 3)) & 3)
