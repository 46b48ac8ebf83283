"""How much of what was asked for a cache of each size would have had: the share of hits over size, in little memory.

Not thread-safe: under the lock of the record that it belongs to.
"""

from __future__ import annotations

from itertools import accumulate

_STEPS = 16
"""Sizes per doubling at which the curve is known exactly; between them it is a straight line."""
_DOUBLINGS = 48
NUM_SIZES = _STEPS * _DOUBLINGS


def _position(size: float) -> int:
    """The first of the known sizes that is at least `size`."""
    doubling = max(0, int(size).bit_length() - 1)
    if doubling >= _DOUBLINGS:
        return NUM_SIZES - 1
    begin = 1 << doubling
    return min(NUM_SIZES - 1, max(0, _STEPS * doubling - int(_STEPS * (begin - size) // begin)))


def size_at(position: int) -> float:
    """The known size at `position`, in the same units as those added."""
    doubling, step = divmod(position, _STEPS)
    return (1 << doubling) * (1 + step / _STEPS)


class HitCurve:
    """Tokens that hit, by the smallest size that would have held them. Sizes are in units of the caller's choice.

    What is added hits evenly over a range of sizes: a line that rises from its begin to its end, kept as two bends.
    A bend is a slope and the slope times its place, so adding one takes constant time.
    """

    def __init__(self) -> None:
        self._slopes = [0.0] * NUM_SIZES
        self._moments = [0.0] * NUM_SIZES

    def add(self, begin: float, end: float, tokens: float) -> None:
        """`tokens` hit in a cache of size `end`, none of them in one of size `begin`, and in between some."""
        slope = tokens / (end - begin)
        for place, bend in ((begin, slope), (end, -slope)):
            position = _position(place)
            self._slopes[position] += bend
            self._moments[position] += bend * place

    def fade(self) -> None:
        """What was added so far counts half as much from now on."""
        self._slopes = [slope / 2 for slope in self._slopes]
        self._moments = [moment / 2 for moment in self._moments]

    def hits(self) -> list[float]:
        """Tokens that hit at each of the known sizes, from small to large."""
        bends = zip(accumulate(self._slopes), accumulate(self._moments), strict=True)
        return [slope * size_at(position) - moment for position, (slope, moment) in enumerate(bends)]
