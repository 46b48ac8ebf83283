"""A sample of recently used blocks, and how much was used after each, within 2 MiB. Not thread-safe.

Blocks are sampled by the first bits of their hashes, so either all uses of a block are in the sample or none. The
sampled share falls when one request, or all together, have too many sampled blocks. A moment numbers a request in the
order of use. The blocks of a request have the same moment of last use, so a prompt's blocks have few moments.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from kvtier.blocks.hashing import HASH_BYTES

MAX_BLOCKS = 12_000
"""Most sampled blocks to remember: up to 130 bytes each if every request has just one."""
MAX_FIRSTS = 2048
"""Most first blocks of requests to remember."""
MAX_SAMPLED = 1024
"""Most sampled blocks of one request."""
_MOST_SAMPLED = 4 * MAX_SAMPLED
"""The bound even for a client that sends hashes that are not uniform."""
_KEY_BYTES = 8
_ALL = 1 << 16
_FINE = 16 * 256
_MANY_MOMENTS = 4
_FAN = 32
_MAX_MOMENTS = _FAN**3


class RecencySums:
    """Sizes by moment, summed on three levels, so that any sum takes few additions."""

    def __init__(self) -> None:
        self._sizes = [0] * _MAX_MOMENTS
        self._sums = [0] * (_FAN * _FAN)
        self._sums_of_sums = [0] * _FAN

    def add(self, moment: int, size: int) -> None:
        self._sizes[moment] += size
        self._sums[moment // _FAN] += size
        self._sums_of_sums[moment // (_FAN * _FAN)] += size

    def since(self, moment: int) -> int:
        """The sum over all later moments."""
        low, high = moment // _FAN + 1, moment // (_FAN * _FAN) + 1
        return (
            sum(self._sizes[moment + 1 : low * _FAN])
            + sum(self._sums[low : high * _FAN])
            + sum(self._sums_of_sums[high:])
        )


class RecentBlocks:
    """Remembers each sampled block until `max_units` of others were used after it."""

    def __init__(self, max_units: int) -> None:
        self._max_units = max_units
        self._num_sampled = _ALL
        """A block is sampled if the first two bytes of its hash, one of `_ALL` values, are below this."""
        self._marks = bytes(256)
        """Indexed by the first byte of a hash: 0 if its block may be sampled, else 1."""
        self._moments: dict[bytes, int] = {}
        """The moment of last use, by the beginning of the hash."""
        self._firsts: dict[bytes, int] = {}
        """The same for the first blocks of requests, sampled or not."""
        self._sums = RecencySums()
        self._block_units = array("I", bytes(4 * _MAX_MOMENTS))
        """The size in units of a block of the request at each moment."""
        self._next_moment = 0

    def __len__(self) -> int:
        return len(self._moments)

    def sample(self, hashes: bytes) -> list[bytes]:
        """Distinct keys of the sampled blocks among `hashes`; lowers the sampled share until they are few enough."""
        while len(hashes) // HASH_BYTES * self._num_sampled > MAX_SAMPLED * _ALL and self._num_sampled > 1:
            self.sample_less()
        marks = hashes[::HASH_BYTES].translate(self._marks)
        begins: list[int] = []
        position = marks.find(0)
        while position >= 0 and len(begins) < _MOST_SAMPLED:
            begins.append(position * HASH_BYTES)
            position = marks.find(0, position + 1)
        keys = dict.fromkeys([hashes[begin : begin + _KEY_BYTES] for begin in begins])
        return list(filter(self._is_sampled, keys) if self._num_sampled % 256 else keys)

    @property
    def scale(self) -> float:
        """How many blocks each sampled block stands for."""
        return _ALL / self._num_sampled

    def unknown(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of blocks that were never used, or too long ago."""
        return [key for key in keys if key not in self._moments]

    def units_since_first(self, key: bytes) -> float | None:
        """Units used since a request last began with this block; None if unknown."""
        moment = self._firsts.get(key)
        return None if moment is None else self._sums.since(moment) * self.scale

    def units_since(self, keys: Sequence[bytes]) -> Iterator[tuple[float, int]]:
        """For the known ones of `keys`: units used since their last use, and how many keys share that figure."""
        scale = self.scale
        for moment, count in self._last_uses(keys):
            yield self._sums.since(moment) * scale, count

    def use(self, keys: Sequence[bytes], block_units: int, first: bytes | None = None) -> None:
        """Make the blocks, and the first block of their request, the most recently used."""
        moment = self._next_moment
        for before, count in self._last_uses(keys):
            self._sums.add(before, -count * self._block_units[before])
        self._sums.add(moment, len(keys) * block_units)
        self._block_units[moment] = block_units
        self._moments.update(dict.fromkeys(keys, moment))
        if first is not None:
            self._firsts[first] = moment
        self._next_moment += 1
        if len(self._moments) > MAX_BLOCKS:
            self._make_room()
        elif self._next_moment == _MAX_MOMENTS:
            self._renumber()
        if len(self._firsts) > MAX_FIRSTS:
            median = sorted(self._firsts.values())[MAX_FIRSTS // 2]
            self._firsts = {key: moment for key, moment in self._firsts.items() if moment > median}

    def sample_less(self) -> None:
        """Stop sampling a quarter of the sampled blocks."""
        self._num_sampled = max(1, self._num_sampled * 3 // 4)
        if self._num_sampled > _FINE:  # while the share is large, the first byte of a hash decides
            self._num_sampled -= self._num_sampled % 256
        last = (self._num_sampled - 1) // 256
        self._marks = bytes(value > last for value in range(256))
        self._moments = {key: moment for key, moment in self._moments.items() if self._is_sampled(key)}
        self._renumber()

    def _last_uses(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """The moments of last use of the known `keys`, each with its number of keys. Usually one or two moments."""
        moments = list(map(self._moments.get, keys))
        found = []
        while moments:
            first = moments[0]
            count = moments.count(first)
            if first is not None:
                found.append((first, count))
            if count == len(moments):
                break
            moments = [moment for moment in moments if moment != first]
            if len(found) == _MANY_MOMENTS:
                return found + [(moment, count) for moment, count in Counter(moments).items() if moment is not None]
        return found

    def _is_sampled(self, key: bytes) -> bool:
        return (key[0] << 8 | key[1]) < self._num_sampled

    def _make_room(self) -> None:
        """Forget blocks too old to matter; if that frees little, sample less."""
        self._renumber()
        if len(self._moments) > MAX_BLOCKS * 7 // 8:
            self.sample_less()

    def _renumber(self) -> None:
        """Renumber the moments from 0 without gaps, and forget the oldest past the bounds."""
        counts = Counter(self._moments.values())
        max_units = self._max_units / self.scale
        max_blocks = MAX_BLOCKS if self._num_sampled > 1 else MAX_BLOCKS // 2
        kept: list[int] = []
        num_units = num_blocks = 0
        for moment in sorted({*counts, *self._firsts.values()}, reverse=True):
            if num_units > max_units or num_blocks > max_blocks:
                break
            kept.append(moment)
            num_blocks += counts[moment]
            num_units += counts[moment] * self._block_units[moment]
        numbers = {moment: number for number, moment in enumerate(reversed(kept))}
        self._moments = _renumbered(self._moments, numbers)
        self._firsts = _renumbered(self._firsts, numbers)
        self._sums = RecencySums()
        for moment, number in numbers.items():  # from the oldest on; a number is never above its moment
            self._block_units[number] = self._block_units[moment]
            self._sums.add(number, counts[moment] * self._block_units[moment])
        self._next_moment = len(kept)


def key_of(hashes: bytes, position: int) -> bytes:
    """The key of the block at `position` of a run of hashes."""
    begin = position * HASH_BYTES
    return hashes[begin : begin + _KEY_BYTES]


def _renumbered(moments: dict[bytes, int], numbers: dict[int, int]) -> dict[bytes, int]:
    return {key: numbers[moment] for key, moment in moments.items() if moment in numbers}
