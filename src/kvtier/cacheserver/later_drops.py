"""Drops to carry out once a disk that is down comes back, within a bound. The caller's lock guards them."""

from __future__ import annotations

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.namespaces import Hashes, MemorySpace

MAX_HASHES = 1 << 18
"""The bound over all namespaces. Past it, a whole namespace is dropped: no dropped block may come back."""


class LaterDrops:
    """Hashes to drop, by namespace; None for a whole namespace."""

    def __init__(self) -> None:
        self._drops: dict[Namespace, tuple[MemorySpace, dict[BlockHash, None] | None]] = {}
        self._num_hashes = 0

    def add(self, space: MemorySpace, hashes: Hashes | None) -> None:
        _, known = self._drops.get(space.namespace, (space, {}))
        if known is None:
            return
        self._num_hashes -= len(known)
        if hashes is None or self._num_hashes + len(known) + len(hashes) > MAX_HASHES:
            known = None
        else:
            known.update(dict.fromkeys(hashes))
            self._num_hashes += len(known)
        self._drops[space.namespace] = (space, known)

    def take(self) -> list[tuple[MemorySpace, Hashes | None]]:
        """Return all drops, and forget them."""
        taken: list[tuple[MemorySpace, Hashes | None]] = [
            (space, None if known is None else list(known)) for space, known in self._drops.values()
        ]
        self._drops.clear()
        self._num_hashes = 0
        return taken
