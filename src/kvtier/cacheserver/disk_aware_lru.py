"""Least recently used first, but what is safe on disk before what is not.

When all that could be evicted is unsafe, because the disk does not keep up, the coldest goes all the same: a slow disk
never stops a set. Such losses are counted, and told to whoever asked for them to be written.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.pool import Block
from kvtier.blocks.share import Share
from kvtier.cacheserver.namespaces import MemoryBlock

_MAX_PASSED_OVER = 256


class DiskAwareLru(LruPolicy[Block]):
    """An exact LRU once everything is on disk. Looks past a bounded number of blocks that are not.

    Without `evicts_unsafe`, what is not on disk yet stays. `on_unsafe` hears of each block that goes while it waits to
    be written.
    """

    def __init__(self, *, evicts_unsafe: bool, on_unsafe: Callable[[Block], None]) -> None:
        super().__init__()
        self._evicts_unsafe = evicts_unsafe
        self._on_unsafe = on_unsafe

    def pop_coldest(self, requester: Share | None = None) -> Block | None:
        for passed_over, block in enumerate(self._order):
            if isinstance(block, MemoryBlock) and block.is_stored:
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
