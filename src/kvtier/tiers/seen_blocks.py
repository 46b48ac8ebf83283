"""Remembers the blocks that this process found or stored in a shared tier: one that is missing now was evicted.

Other hosts evict from such a tier without notice. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.blocks.ghosts import Ghosts
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd


class SeenBlocks:
    """The blocks seen in one tier, as many as `Ghosts` keeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = Ghosts()

    def note(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            for block_hash in hashes:
                if not self._seen.has(block_hash):
                    self._seen.add(block_hash)

    def forget(self, hashes: Sequence[BlockHash] | None) -> None:
        """Forget `hashes`, or all if None, which were dropped on purpose."""
        with self._lock:
            if hashes is None:
                self._seen.clear()
                return
            for block_hash in hashes:
                self._seen.discard(block_hash)

    def ending(self, block_hash: BlockHash) -> MatchEnd:
        """Why a match ended at this block, which the tier lacks."""
        with self._lock:
            return MatchEnd.EVICTED if self._seen.has(block_hash) else MatchEnd.NEVER_STORED
