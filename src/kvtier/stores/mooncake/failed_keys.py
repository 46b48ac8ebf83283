"""Blocks for which a pool failed a moment ago, so that it is not asked for them until later. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from kvtier.blocks.hashing import BlockHash

_REMEMBERED_S = 15.0
_MOST = 1 << 16


class FailedKeys:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[BlockHash, float] = {}

    def add(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            for block_hash in hashes:
                self._until.pop(block_hash, None)
                self._until[block_hash] = self._clock() + _REMEMBERED_S
            while len(self._until) > _MOST:
                del self._until[next(iter(self._until))]

    def has(self, block_hash: BlockHash) -> bool:
        with self._lock:
            until = self._until.get(block_hash)
            if until is None:
                return False
            if self._clock() < until:
                return True
            del self._until[block_hash]
            return False

    def discard(self, hashes: Iterable[BlockHash] | None) -> None:
        """Forget these, or all."""
        with self._lock:
            if hashes is None:
                self._until.clear()
                return
            for block_hash in hashes:
                self._until.pop(block_hash, None)
