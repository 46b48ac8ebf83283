"""Blocks that wait until their segment is whole. Thread-safe.

They are copied, since the caller wants its buffer back. If there are too many, those waiting longest are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from kvtier.blocks.hashing import BlockHash


class Collector:
    """Holds at most `max_bytes`."""

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self._max_blocks = max_bytes // block_bytes
        self._lock = threading.Lock()
        self._payloads: dict[BlockHash, bytes] = {}

    def add(self, block_hash: BlockHash, payload: memoryview) -> bool:
        """False if it is here already, and then counts as new, or if there is no room."""
        with self._lock:
            held = self._payloads.pop(block_hash, None)
            if held is None and not self._max_blocks:
                return False
            self._payloads[block_hash] = bytes(payload) if held is None else held
            while len(self._payloads) > self._max_blocks:
                del self._payloads[next(iter(self._payloads))]
        return held is None

    def has(self, segment: Sequence[BlockHash]) -> bool:
        """Whether all of these blocks are here."""
        with self._lock:
            return bool(segment) and all(block_hash in self._payloads for block_hash in segment)

    def take(self, segment: Sequence[BlockHash], shared: Collection[BlockHash] = ()) -> list[bytes] | None:
        """Take the payloads of all these blocks, but keep those in `shared`; None if one is missing."""
        with self._lock:
            if not segment or any(block_hash not in self._payloads for block_hash in segment):
                return None
            payloads = [self._payloads[block_hash] for block_hash in segment]
            for block_hash in segment:
                if block_hash not in shared:
                    del self._payloads[block_hash]
            return payloads

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """Drop these blocks."""
        with self._lock:
            for block_hash in hashes:
                self._payloads.pop(block_hash, None)
