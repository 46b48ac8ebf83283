"""Pages of vLLM's pool that are held while they are saved. The scheduler's thread owns them.

vLLM gives pages of windows and states back while their request runs, and all pages of a request that is preempted.
What is being copied must stay what it is until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool

_SHARE = 2
"""At most one in so many pages is held: the others are for requests."""


class Pins:
    """By the number of a save."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._pages: dict[int, list[int]] = {}
        self._num_held = 0

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, number: int, pages: Sequence[int]) -> bool:
        """Whether these pages, which their request has, are held now: not while many others are."""
        pool = self._pool
        if pool is None or self._num_held + len(pages) > pool.num_gpu_blocks // _SHARE:
            return False
        pool.touch([pool.blocks[page] for page in pages])
        self._pages[number] = list(pages)
        self._num_held += len(pages)
        return True

    def release(self, number: int) -> None:
        """Its pages are copied. What is not held any more is nothing to release."""
        pages = self._pages.pop(number, [])
        self._num_held -= len(pages)
        if self._pool is not None and pages:
            self._pool.free_blocks([self._pool.blocks[page] for page in reversed(pages)])
