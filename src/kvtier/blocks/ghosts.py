"""Hashes of recently evicted blocks, to distinguish "evicted" from "never stored". Holds no blocks and no lock.

The table has buckets of eight places with eight bytes each; a full bucket forgets its oldest hash. So memory is bounded
whatever is evicted, and a wrong answer is as likely as two equal 64-bit numbers in one bucket. Hashes of different
scopes are separate: a lookup in one scope reveals nothing of another. The owner makes all calls under its pool's lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvtier.blocks.block import ENDED, Presence
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.pool import Match

MAX_GHOSTS = 1 << 18
_WAYS = 8


def scope_of(namespace: bytes) -> int:
    """The scope of a namespace's blocks. It is mixed first: a block's hash may equal its namespace, and XOR to zero."""
    return hash(b"scope" + namespace)


class Ghosts:
    """At most `max_hashes` hashes, newest first in each bucket. Takes no memory before the first."""

    def __init__(self, max_hashes: int = MAX_GHOSTS) -> None:
        self._num_buckets = max(1, max_hashes // _WAYS)
        self._places = array("q")

    @property
    def nbytes(self) -> int:
        return len(self._places) * self._places.itemsize

    def add(self, block_hash: BlockHash, scope: int = 0) -> None:
        if not self._places:
            self._places = array("q", bytes(8 * _WAYS * self._num_buckets))
        number, first = self._place(block_hash, scope)
        places = self._places
        places[first + 1 : first + _WAYS] = places[first : first + _WAYS - 1]
        places[first] = number

    def discard(self, block_hash: BlockHash, scope: int = 0) -> None:
        """Forget a hash, for instance of a block dropped on purpose."""
        if not self._places:
            return
        number, first = self._place(block_hash, scope)
        bucket = self._places[first : first + _WAYS]
        while number in bucket:  # once for each of its evictions
            bucket.remove(number)
            bucket.append(0)
        self._places[first : first + _WAYS] = bucket

    def clear(self) -> None:
        self._places = array("q")

    def has(self, block_hash: BlockHash, scope: int = 0) -> bool:
        places = self._places
        if not places:
            return False
        number = hash(block_hash) ^ scope or 1  # inlined from `_place`: called for every block of a cold prompt
        first = number % self._num_buckets * _WAYS
        return number in places[first : first + _WAYS]

    def ending(self, match: Match, hashes: Sequence[BlockHash]) -> MatchEnd:
        """Why `match` ended, a match of `hashes`."""
        if match.ended is Presence.MISS and self.has(hashes[len(match.blocks)]):
            return MatchEnd.EVICTED
        return ENDED[match.ended]

    def _place(self, block_hash: BlockHash, scope: int) -> tuple[int, int]:
        """The number that represents a hash (0 is an empty place), and where its bucket begins."""
        number = hash(block_hash) ^ scope or 1
        return number, number % self._num_buckets * _WAYS
