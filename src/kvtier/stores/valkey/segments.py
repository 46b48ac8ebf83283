"""Where a block stands in its prompt, for blocks that were seen lately: the place decides the shard. Thread-safe.

Blocks of a segment lie on one shard, under the hash of the segment's first block. A block's hash does not tell which
segment it is in, so whoever looks up or stores a part of a prompt must have shown its beginning before.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.blocks.hashing import BlockHash

_MAX_BLOCKS = 1 << 17


class Place(NamedTuple):
    """Of a block: its segment's first block, and its number in the prompt."""

    head: BlockHash
    position: int


class Segments:
    """Of `segment_blocks` blocks each."""

    def __init__(self, segment_blocks: int, max_blocks: int = _MAX_BLOCKS) -> None:
        self._segment_blocks = segment_blocks
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._places: dict[BlockHash, Place] = {}

    def places(self, hashes: Sequence[BlockHash]) -> list[Place]:
        """A block that is not known follows the one before it here, or begins a prompt."""
        places: list[Place] = []
        known = self._places
        with self._lock:
            last: Place | None = None
            for block_hash in hashes:
                place = known.get(block_hash)
                if place is None:
                    position = 0 if last is None else last.position + 1
                    head = block_hash if last is None or position % self._segment_blocks == 0 else last.head
                    place = known[block_hash] = Place(head, position)
                places.append(place)
                last = place
            if len(known) > self._max_blocks:
                for block_hash in list(itertools.islice(known, len(known) - self._max_blocks // 2)):
                    del known[block_hash]
        return places

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's blocks so far, from its first on."""
        num_known = len(hashes)
        while num_known and hashes[num_known - 1] not in self._places:
            num_known -= 1
        if num_known < len(hashes):
            self.places(hashes[max(0, num_known - 1) :])
