"""vLLM's own prefix cache: how much of a prompt it has, before its scheduler looks. Owned by the scheduler's thread."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request


class OwnCache:
    """An engine's prefix cache, hashed by `page_tokens`. With `is_one_full`, it has one group, of full attention."""

    def __init__(self, page_tokens: int, *, is_one_full: bool = True) -> None:
        self._page_tokens = page_tokens
        self._is_one_full = is_one_full
        self._pool: BlockPool | None = None
        self._known_blocks: object = None
        self._manager: KVCacheManager | None = None

    def bind(self, pool: BlockPool) -> None:
        if pool.hash_block_size == self._page_tokens:
            self._pool = pool
            self._known_blocks = pool.cached_block_hash_to_block

    def take_reset(self) -> bool:
        """Whether vLLM has emptied it since the last call: a reset replaces the map of cached blocks."""
        if self._pool is None:
            return False
        before, self._known_blocks = self._known_blocks, self._pool.cached_block_hash_to_block
        return before is not self._known_blocks

    def bind_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def hashes_of(self, request: Request, num_tokens: int | None = None) -> list[bytes]:
        """vLLM's hashes of all full pages, or of the first `num_tokens`; empty if its pages have another size."""
        if self._pool is None:
            return []
        hashes = request.block_hashes
        num_pages = (request.num_tokens if num_tokens is None else num_tokens) // self._page_tokens
        return hashes[:num_pages]

    def num_tokens(self, request: Request) -> int:
        """About what its scheduler will find, by bisection: pages at the end of a prompt are evicted first."""
        if self._pool is None or request.skip_reading_prefix_cache:
            return 0
        if not self._is_one_full:
            return self._num_in_groups(request)
        hashes = self.hashes_of(request, request.num_tokens - 1)
        low, high = 0, len(hashes)
        if high and self._pool.get_cached_block(hashes[-1], [0]):
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            if self._pool.get_cached_block(hashes[middle - 1], [0]):
                low = middle
            else:
                high = middle - 1
        return low * self._page_tokens

    def _num_in_groups(self, request: Request) -> int:
        """The tokens that vLLM itself finds: with windows, a page may be cached although the one before it is not."""
        if self._manager is None or not self._manager.enable_caching:
            return 0
        return int(self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])
