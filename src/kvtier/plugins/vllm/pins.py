"""Pages of vLLM's pool that are held while they are saved. The scheduler's thread owns them.

vLLM frees pages of windows and states while their request runs, and all pages of a preempted request. A page that is
being copied must not change until the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool

_SHARE = 2
"""At most one in this many pages is held: the others are for requests."""


class Pins:
    """The held pages of each save, by its number."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._pages: dict[int, list[int]] = {}
        self._num_held = 0

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_saves(self) -> int:
        """Saves that hold pages."""
        return len(self._pages)

    def hold(self, number: int, pages: Sequence[int]) -> bool:
        """Hold pages of a request until `release`. False, and none is held, while too many others are.

        A save without pages is not noted: no release comes for it.
        """
        if not pages:
            return True
        pool = self._pool
        if pool is None or self._num_held + len(pages) > pool.num_gpu_blocks // _SHARE:
            return False
        pool.touch([pool.blocks[page] for page in pages])
        self._pages[number] = list(pages)
        self._num_held += len(pages)
        return True

    def release(self, number: int) -> None:
        """The save's pages are copied. A number that holds nothing is ignored."""
        pages = self._pages.pop(number, [])
        self._num_held -= len(pages)
        if self._pool is not None and pages:
            self._pool.free_blocks([self._pool.blocks[page] for page in reversed(pages)])
