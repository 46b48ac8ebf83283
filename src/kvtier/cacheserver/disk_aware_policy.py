"""The adaptive policy for memory above a disk: evicts blocks that are on disk before blocks still queued for it."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.blocks.adaptive_policy import AdaptivePolicy
from kvtier.blocks.block import Block
from kvtier.blocks.run import Run
from kvtier.blocks.share import Share
from kvtier.cacheserver.disk_aware_lru import is_safe_to_evict
from kvtier.cacheserver.namespaces import MemoryBlock

_MAX_PASSED_OVER = 256
_MAX_TRIES = 16
_POPS_BY_AGE = 64


class DiskAwarePolicy(AdaptivePolicy[Block]):
    """Passes over a bounded number of blocks that wait to be written; see `DiskAwareLru`.

    The block of least worth is often the newest, which is not on disk yet: after a few tries, the next victims are
    picked among the oldest blocks. No block is declined, since blocks reach the disk only through memory.
    """

    def __init__(self, *, evicts_unsafe: bool, on_unsafe: Callable[[Block], None], clock: Callable[[], float]) -> None:
        super().__init__(declines=False, clock=clock)
        self._evicts_unsafe = evicts_unsafe
        self._on_unsafe = on_unsafe
        self._num_by_age = 0

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[Block] | None = None) -> Block | None:
        passed_over: list[Block] = []
        found: Block | None = None
        while len(passed_over) <= _MAX_PASSED_OVER:
            if len(passed_over) == _MAX_TRIES:
                self._num_by_age = _POPS_BY_AGE
            if self._num_by_age:
                block = self.pop_oldest()
            else:
                block = next(iter(super().pop_several(1, requester, newcomer)), None)
            if block is None:
                break
            if isinstance(block, MemoryBlock) and is_safe_to_evict(block, evicts_unsafe=self._evicts_unsafe):
                found = block
                break
            passed_over.append(block)
        self._num_by_age = max(0, self._num_by_age - 1)
        if found is None and passed_over and self._evicts_unsafe:
            found = passed_over.pop(0)
            if isinstance(found, MemoryBlock) and found.is_queued:
                self._on_unsafe(found)
        if passed_over:
            self.put_back(passed_over)
        return found

    def pop_several(
        self, count: int, requester: Share | None = None, newcomer: Run[Block] | None = None
    ) -> list[Block]:
        block = self.pop_coldest(requester, newcomer)
        return [] if block is None else [block]
