"""Least recently used first, but what is safe on disk before what still has to get there.

When all that could be evicted is unsafe, because the disk does not keep up, the coldest goes all the same: a slow disk
never stops a set. Such losses are counted, and reported to the client that asked for the write.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.pool import Block
from kvtier.blocks.run import Run
from kvtier.blocks.share import Share
from kvtier.cacheserver.namespaces import MemoryBlock

_MAX_PASSED_OVER = 256


class DiskAwareLru(LruPolicy[Block]):
    """An exact LRU once nothing waits to be written. Looks past a bounded number of blocks that do.

    Without `evicts_unsafe`, what is not on disk yet stays, and nothing is withheld from the disk. `on_unsafe` hears of
    each block that goes while it waits.
    """

    def __init__(self, *, evicts_unsafe: bool, on_unsafe: Callable[[Block], None]) -> None:
        super().__init__()
        self._evicts_unsafe = evicts_unsafe
        self._on_unsafe = on_unsafe

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[Block] | None = None) -> Block | None:
        for passed_over, block in enumerate(self._order):
            if isinstance(block, MemoryBlock) and may_go(block, evicts_unsafe=self._evicts_unsafe):
                del self._order[block]
                return block
            if passed_over == _MAX_PASSED_OVER:
                break
        if not self._evicts_unsafe:
            return None
        coldest = super().pop_coldest()
        if isinstance(coldest, MemoryBlock) and coldest.is_queued and not coldest.is_stored:
            self._on_unsafe(coldest)
        return coldest

    def pop_several(
        self, count: int, requester: Share | None = None, newcomer: Run[Block] | None = None
    ) -> list[Block]:
        block = self.pop_coldest(requester, newcomer)
        return [] if block is None else [block]


def may_go(block: MemoryBlock, *, evicts_unsafe: bool) -> bool:
    """It is on disk, or was never to go there: a disk may store only what is used again, within a budget."""
    return block.is_stored or (evicts_unsafe and not block.is_queued)
