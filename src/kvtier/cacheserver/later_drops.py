"""What is to be dropped from a disk that is down, within a bound. Its caller's lock guards it."""

from __future__ import annotations

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.namespaces import Hashes, MemorySpace

MAX_HASHES = 1 << 18
"""Of all namespaces. One in which more is to be dropped is dropped whole: nothing comes back that was to go."""


class LaterDrops:
    """Blocks by namespace; None for all of one."""

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
        """All of it, and nothing is left."""
        taken: list[tuple[MemorySpace, Hashes | None]] = [
            (space, None if known is None else list(known)) for space, known in self._drops.values()
        ]
        self._drops.clear()
        self._num_hashes = 0
        return taken
