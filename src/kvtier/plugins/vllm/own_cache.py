"""vLLM's own prefix cache: what it has of a prompt, before its scheduler looks. The scheduler's thread owns it."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request


class OwnCache:
    """Of an engine whose pages are hashed by `page_tokens`. With `is_one_full`, it has one group, of full attention."""

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
        """Whether vLLM has emptied it since the last call: its blocks are kept elsewhere then."""
        if self._pool is None:
            return False
        before, self._known_blocks = self._known_blocks, self._pool.cached_block_hash_to_block
        return before is not self._known_blocks

    def bind_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def hashes_of(self, request: Request, num_tokens: int | None = None) -> list[bytes]:
        """vLLM's hashes of all full pages, or of those of the first `num_tokens`; empty where its pages are others."""
        if self._pool is None:
            return []
        hashes = request.block_hashes
        num_pages = (request.num_tokens if num_tokens is None else num_tokens) // self._page_tokens
        return list(hashes[: min(num_pages, len(hashes))])

    def num_tokens(self, request: Request) -> int:
        """About as many as its scheduler will find: pages at the end of a prompt are the first to go."""
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
        """What vLLM finds itself: no rule says that what lies before a page that it has is there, too."""
        if self._manager is None or not self._manager.enable_caching:
            return 0
        return int(self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])
