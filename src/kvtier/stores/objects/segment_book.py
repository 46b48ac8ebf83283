"""The segment of each block, for prompts that were seen lately. Thread-safe.

A segment is a fixed number of consecutive blocks of a prompt, counted from its beginning, and is named by its last
block: that hash covers all blocks before it, so a name stands for the same bytes forever. Prompts that diverge within a
segment have a segment each, with the same blocks at its beginning. The last block tells them apart, if it is among
those requested; otherwise the most recently seen segment is used.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.blocks.hashing import BlockHash

_MAX_BLOCKS = 1 << 17


class SegmentPlace(NamedTuple):
    """A block's place: its segment's name, and its number in the segment."""

    segment: BlockHash
    number: int


class SegmentBook:
    """A book of segments of `segment_blocks`. Blocks behind a prompt's last whole segment have no place."""

    def __init__(self, segment_blocks: int, max_blocks: int = _MAX_BLOCKS) -> None:
        self._segment_blocks = segment_blocks
        self._max_segments = max(1, max_blocks // segment_blocks)
        self._lock = threading.Lock()
        self._segments: dict[BlockHash, tuple[BlockHash, ...]] = {}
        self._places: dict[BlockHash, SegmentPlace] = {}

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's blocks so far, from its first on."""
        size = self._segment_blocks
        with self._lock:
            for first in range(0, len(hashes) - size + 1, size):
                name = hashes[first + size - 1]
                place = self._places.get(hashes[first])
                if place is None or place.segment != name:  # the prompt seen last has all of its blocks
                    self._add(name, tuple(hashes[first : first + size]))

    def places(self, hashes: Sequence[BlockHash]) -> list[SegmentPlace | None]:
        """The places of consecutive blocks of a prompt."""
        with self._lock:
            places = [self._places.get(block_hash) for block_hash in hashes]
            for last, name in enumerate(hashes):
                blocks = self._segments.get(name, ())
                first = max(0, last + 1 - len(blocks))
                if blocks and places[first] != SegmentPlace(name, len(blocks) - (last + 1 - first)):
                    for number, position in enumerate(range(last, first - 1, -1), 1):
                        if hashes[position] == blocks[-number]:
                            places[position] = SegmentPlace(name, len(blocks) - number)
            return places

    def shared(self, segment: BlockHash) -> set[BlockHash]:
        """Blocks of a segment that are also in another one, which was seen since."""
        with self._lock:
            blocks = self._segments.get(segment, ())
            places = map(self._places.get, blocks)
            return {block for block, place in zip(blocks, places, strict=True) if place and place.segment != segment}

    def blocks_of(self, segment: BlockHash) -> Sequence[BlockHash]:
        """Empty if the segment is no longer known."""
        with self._lock:
            return self._segments.get(segment, ())

    def _add(self, name: BlockHash, blocks: tuple[BlockHash, ...]) -> None:
        self._segments[name] = blocks
        for number, block_hash in enumerate(blocks):
            self._places[block_hash] = SegmentPlace(name, number)
        if len(self._segments) > self._max_segments:
            for old in list(itertools.islice(self._segments, len(self._segments) - self._max_segments // 2)):
                for block_hash in self._segments.pop(old):
                    place = self._places.get(block_hash)
                    if place is not None and place.segment == old:
                        del self._places[block_hash]
