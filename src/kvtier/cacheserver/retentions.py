"""Retains blocks for clients, in memory and on disk. Thread-safe: takes the catalog's lock."""

from __future__ import annotations

import threading

from kvtier.blocks.pool import BlockPool
from kvtier.blocks.retention import Retention
from kvtier.cacheserver.namespaces import Hashes, MemorySpace
from kvtier.cacheserver.persistence import Disk


class Retentions:
    """Without `keeps_stored`, memory is only a buffer before the disk, and blocks are retained on disk alone."""

    def __init__(self, lock: threading.Lock, pool: BlockPool, disk: Disk, *, keeps_stored: bool) -> None:
        self._lock = lock
        self._pool = pool
        self._disk = disk
        self._keeps_stored = keeps_stored

    def retain(self, space: MemorySpace, hashes: Hashes, retention: Retention) -> int:
        """Retain the leading blocks of `hashes`, present or not. Returns how many are retained in memory or on disk."""
        with self._lock:
            limit = space.tenant.memory.max_retained or 0
            num_kept = self._pool.retain(space.index, hashes, retention, limit) if self._keeps_stored else 0
            return max(num_kept, self._disk.retain(space, hashes, retention))

    def end(self, space: MemorySpace, hashes: Hashes, account: str) -> int:
        """End the retention of `hashes` by `account`. Returns how many blocks it had retained."""
        with self._lock:
            num_ended = self._pool.end_retention(space.index, hashes, account)
            return max(num_ended, self._disk.end_retention(space, hashes, account))
