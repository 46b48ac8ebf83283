"""The hit curve: how many of the requested tokens a cache of each size would have had. Takes little memory.

Not thread-safe: guarded by the lock of the record that owns it.
"""

from __future__ import annotations

from itertools import accumulate

_STEPS = 16
"""Sizes per doubling at which the curve is exact; it is linear between them."""
_DOUBLINGS = 48
NUM_SIZES = _STEPS * _DOUBLINGS


def _position(size: float) -> int:
    """The position of the first known size that is at least `size`."""
    doubling = max(0, int(size).bit_length() - 1)
    if doubling >= _DOUBLINGS:
        return NUM_SIZES - 1
    begin = 1 << doubling
    return min(NUM_SIZES - 1, max(0, _STEPS * doubling - int(_STEPS * (begin - size) // begin)))


def size_at(position: int) -> float:
    """The known size at `position`, in the caller's units."""
    doubling, step = divmod(position, _STEPS)
    return (1 << doubling) * (1 + step / _STEPS)


class HitCurve:
    """Counts tokens that hit, by the smallest cache size that would have held them. The caller chooses the unit.

    Each addition spreads its hits evenly over a range of sizes: a ramp from `begin` to `end`, stored as two bends.
    A bend is a slope and the product of slope and place, so an addition takes constant time.
    """

    def __init__(self) -> None:
        self._slopes = [0.0] * NUM_SIZES
        self._moments = [0.0] * NUM_SIZES

    def add(self, begin: float, end: float, tokens: float) -> None:
        """Add `tokens` that all hit in a cache of size `end`, and none in one of size `begin`; linear in between."""
        slope = tokens / (end - begin)
        for place, bend in ((begin, slope), (end, -slope)):
            position = _position(place)
            self._slopes[position] += bend
            self._moments[position] += bend * place

    def fade(self) -> None:
        """Halve the weight of everything added so far."""
        self._slopes = [slope / 2 for slope in self._slopes]
        self._moments = [moment / 2 for moment in self._moments]

    def hits(self) -> list[float]:
        """Tokens that hit at each of the known sizes, from small to large."""
        bends = zip(accumulate(self._slopes), accumulate(self._moments), strict=True)
        return [slope * size_at(position) - moment for position, (slope, moment) in enumerate(bends)]
