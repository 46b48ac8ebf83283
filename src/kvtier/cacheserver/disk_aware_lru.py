"""Least recently used first, but blocks that are on disk before blocks that are still queued for it.

If the disk cannot keep up and all evictable blocks are still queued, the coldest is evicted all the same: a slow disk
never stops a set. Such losses are counted, and reported to the client that asked for the write.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.blocks.block import Block
from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.run import Run
from kvtier.blocks.share import Share
from kvtier.cacheserver.namespaces import MemoryBlock

_MAX_PASSED_OVER = 256


class DiskAwareLru(LruPolicy[Block]):
    """An exact LRU when no block waits to be written; otherwise it passes over a bounded number of waiting blocks.

    Without `evicts_unsafe`, blocks that are not on disk yet are never evicted; nothing may be withheld from the disk
    then. `on_unsafe` is called with each block evicted while it waits.
    """

    def __init__(self, *, evicts_unsafe: bool, on_unsafe: Callable[[Block], None]) -> None:
        super().__init__()
        self._evicts_unsafe = evicts_unsafe
        self._on_unsafe = on_unsafe

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[Block] | None = None) -> Block | None:
        for passed_over, block in enumerate(self._order):
            if isinstance(block, MemoryBlock) and is_safe_to_evict(block, evicts_unsafe=self._evicts_unsafe):
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


def is_safe_to_evict(block: MemoryBlock, *, evicts_unsafe: bool) -> bool:
    """The block is on disk, or is not queued for it: a disk may store only reused blocks, within a budget."""
    return block.is_stored or (evicts_unsafe and not block.is_queued)
