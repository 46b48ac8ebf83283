"""Where a block stands in its prompt, for blocks that were seen lately: the place decides the shard. Thread-safe.

Blocks of a segment lie on one shard, under the hash of the segment's first block. A block's hash does not tell which
segment it is in, so whoever looks up or stores a part of a prompt must have shown its beginning before.

A prompt is stored in parts, over seconds. All of them count from when the prompt was last asked for: counted from when
each was stored, its beginning would be the oldest of it, and would be evicted first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.blocks.hashing import BlockHash

_MAX_BLOCKS = 1 << 17


class Place(NamedTuple):
    """Of a block: its segment's first block, its number in the prompt, and when that was asked for (ms since 1970)."""

    head: BlockHash
    position: int
    asked_ms: int


class Segments:
    """Of `segment_blocks` blocks each."""

    def __init__(
        self, segment_blocks: int, max_blocks: int = _MAX_BLOCKS, clock: Callable[[], float] = time.time
    ) -> None:
        self._segment_blocks = segment_blocks
        self._max_blocks = max_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[BlockHash, Place] = {}

    def places(self, hashes: Sequence[BlockHash]) -> list[Place]:
        """A block that is not known follows the one before it here, or begins a prompt that is asked for now."""
        return self._places_of(hashes, is_asked=False)

    def ask(self, hashes: Sequence[BlockHash]) -> list[Place]:
        """As `places`, of blocks that are asked for now."""
        return self._places_of(hashes, is_asked=True)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's blocks so far, from its first on."""
        num_known = len(hashes)
        while num_known and hashes[num_known - 1] not in self._places:
            num_known -= 1
        if num_known < len(hashes):
            self.places(hashes[max(0, num_known - 1) :])

    def _places_of(self, hashes: Sequence[BlockHash], *, is_asked: bool) -> list[Place]:
        places: list[Place] = []
        known = self._places
        now_ms = int(self._clock() * 1000)
        with self._lock:
            last: Place | None = None
            for block_hash in hashes:
                place = known.get(block_hash)
                if place is None:
                    position = 0 if last is None else last.position + 1
                    head = block_hash if last is None or position % self._segment_blocks == 0 else last.head
                    place = known[block_hash] = Place(head, position, now_ms if last is None else last.asked_ms)
                if is_asked:
                    place = known[block_hash] = Place(place.head, place.position, now_ms)
                places.append(place)
                last = place
            if len(known) > self._max_blocks:
                for block_hash in list(itertools.islice(known, len(known) - self._max_blocks // 2)):
                    del known[block_hash]
        return places
