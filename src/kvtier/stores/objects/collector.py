"""Blocks that wait until their segment is whole. Thread-safe.

They are copied: whoever offers a block wants its buffer back. What waits longest goes when there are too many.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash


class Collector:
    """Holds at most `max_bytes`."""

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self._max_blocks = max_bytes // block_bytes
        self._lock = threading.Lock()
        self._payloads: dict[BlockHash, bytes] = {}

    def add(self, block_hash: BlockHash, payload: memoryview) -> bool:
        """False for one that is here, or if there is room for none."""
        with self._lock:
            if block_hash in self._payloads or not self._max_blocks:
                return False
            self._payloads[block_hash] = bytes(payload)
            while len(self._payloads) > self._max_blocks:
                del self._payloads[next(iter(self._payloads))]
        return True

    def whole(self, segment: Sequence[BlockHash]) -> list[bytes] | None:
        """The payloads of all these blocks; None while one is missing."""
        with self._lock:
            if not segment or any(block_hash not in self._payloads for block_hash in segment):
                return None
            return [self._payloads[block_hash] for block_hash in segment]

    def discard(self, segment: Sequence[BlockHash]) -> None:
        """They wait no longer."""
        with self._lock:
            for block_hash in segment:
                self._payloads.pop(block_hash, None)
