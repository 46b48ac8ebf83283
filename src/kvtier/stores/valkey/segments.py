"""Where a block stands in its prompt, for blocks that were seen lately: the place decides the shard. Thread-safe.

Blocks of a segment lie on one shard, under the hash of the segment's first block. A block's hash does not tell which
segment it is in, so a caller must show the beginning of a prompt before it looks up or stores a part of it.

Where a prompt was first seen from its middle on, that is taken for its beginning, until more of it is seen: of two
places of a block, the one further into the prompt is right.

A prompt is stored in parts, over seconds. All of them count from when the prompt was last asked for: counted from when
each was stored, its beginning would be the oldest of it, and would be evicted first. So what is asked for counts for
what precedes it, too, wherever that is found: a part of a prompt never counts from later than its beginning.
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
    """A block's place: its segment's first block, its number in the prompt, and its last use (ms since 1970).

    `before` is the block before it, if that was seen.
    """

    head: BlockHash
    position: int
    asked_ms: int
    before: BlockHash | None = None


class Segments:
    """The segments of prompts, with `segment_blocks` blocks each."""

    def __init__(
        self,
        segment_blocks: int,
        max_blocks: int = _MAX_BLOCKS,
        clock: Callable[[], float] = time.time,
        renewal_s: float = 0.0,
    ) -> None:
        """What precedes the blocks that are asked for counts anew after `renewal_s`."""
        self._renewal_ms = int(renewal_s * 1000)
        self._segment_blocks = segment_blocks
        self._max_blocks = max_blocks
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[BlockHash, Place] = {}

    def places(self, hashes: Sequence[BlockHash]) -> list[Place]:
        """A block that is not known follows the one before it here, or begins a prompt that is asked for now."""
        places: list[Place] = []
        now_ms = self._now_ms()
        with self._lock:
            last: BlockHash | None = None
            for block_hash in hashes:
                place = self._places.get(block_hash)
                if place is None:
                    place = Place(block_hash, 0, now_ms) if last is None else self._after(last, places[-1], block_hash)
                    self._places[block_hash] = place
                places.append(place)
                last = block_hash
            self._forget_oldest()
        return places

    def ask(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """These are asked for now, and what precedes them is used. Returns all that count from later on than before.

        If what precedes them counted a moment ago, they count from then on.
        """
        if not hashes:
            return []
        self.places(hashes)
        moved: list[BlockHash] = []
        with self._lock:
            preceding, asked_ms = self._preceding(hashes[0])
            for block_hash in (*preceding, *hashes):
                place = self._places.pop(block_hash, None)  # it is among the latest from now on
                if place is None:
                    continue
                if place.asked_ms < asked_ms:
                    place = place._replace(asked_ms=asked_ms)
                    moved.append(block_hash)
                self._places[block_hash] = place
        return moved

    def __len__(self) -> int:
        return len(self._places)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's blocks so far, from its first on, or from one on whose place is known."""
        if not hashes:
            return
        (first,) = self.places(hashes[:1])
        num_known = len(hashes)
        while num_known > 1 and hashes[num_known - 1] not in self._places:
            num_known -= 1
        last = self._places.get(hashes[num_known - 1])
        if last is None or last.position < first.position + num_known - 1:
            num_known = 1  # a part of it was taken for a beginning
        if num_known < len(hashes):
            self._correct(hashes[num_known - 1 :])

    def complete(self, hashes: Sequence[BlockHash]) -> None:
        """As `learn`, where parts of the prompt may be known that came without their beginning."""
        self.places(hashes[:1])
        self._correct(hashes)

    def follow(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks in a row of one prompt: they are known if the first of them is."""
        if hashes and hashes[0] in self._places:
            self.complete(hashes)

    def place(self, block_hash: BlockHash, head: BlockHash, position: int, before: BlockHash | None = None) -> None:
        """Record a block's place as a client sent it, and possibly the block before."""
        with self._lock:
            place = self._places.pop(block_hash, None)  # it is the latest of all from now on
            known = self._places.get(before) if place is None and before is not None else place
            asked_ms = self._now_ms() if known is None else known.asked_ms
            if place is None or place.position < position:
                place = Place(head, position, asked_ms, before)
            elif place.before is None and place.position == position:
                place = place._replace(before=before)
            self._places[block_hash] = place
            self._forget_oldest()

    def get(self, block_hash: BlockHash) -> Place | None:
        """The place of a block; None if unknown."""
        return self._places.get(block_hash)

    def forget_older_half(self) -> None:
        with self._lock:
            for block_hash in list(itertools.islice(self._places, -(-len(self._places) // 2))):
                del self._places[block_hash]

    def _correct(self, hashes: Sequence[BlockHash]) -> None:
        """The place of the first of `hashes` is right: so those that follow are further into the prompt."""
        with self._lock:
            known = self._places
            for last, block_hash in itertools.pairwise(hashes):
                before, place = known.get(last), known.get(block_hash)
                if before is not None and (place is None or place.position <= before.position):
                    known[block_hash] = self._after(last, before, block_hash)
                elif before is not None and place is not None and place.before is None:
                    known[block_hash] = place._replace(before=last)
            self._forget_oldest()

    def _after(self, last: BlockHash, before: Place, block_hash: BlockHash) -> Place:
        position = before.position + 1
        head = block_hash if position % self._segment_blocks == 0 else before.head
        return Place(head, position, before.asked_ms, last)

    def _forget_oldest(self) -> None:
        """Half of them, once there are too many."""
        known = self._places
        if len(known) > self._max_blocks:
            for block_hash in list(itertools.islice(known, len(known) - self._max_blocks // 2)):
                del known[block_hash]

    def _preceding(self, block_hash: BlockHash) -> tuple[list[BlockHash], int]:
        """Blocks before this one that are due, from the prompt's first on, and from when on they are to count.

        That is when the block before them was asked for, if that is not due.
        """
        now_ms = self._now_ms()
        preceding: list[BlockHash] = []
        place = self._places.get(block_hash)
        while place is not None and place.before is not None:
            before = self._places.get(place.before)
            if before is None or before.position >= place.position:
                break
            if before.asked_ms >= now_ms - self._renewal_ms:
                return preceding[::-1], before.asked_ms
            preceding.append(place.before)
            place = before
        return preceding[::-1], now_ms

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
