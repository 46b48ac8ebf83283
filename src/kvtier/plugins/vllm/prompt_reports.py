"""Reports to kvtier's HTTP server which of the prompts that it has sent are in vLLM's own prefix cache.

The HTTP server knows prompts as text, vLLM as hashes of pages: what they have in common is the id of a request, which
vLLM builds into its own. Models with pages of full attention only: of others, no prompt is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request

from kvtier.errors import ConfigError
from kvtier.plugins.vllm.settings import ConnectorSettings
from kvtier.transfer.cached_prompts import Prompt
from kvtier.transfer.prompt_events import PromptEvents
from kvtier.transport.address import UnixAddress, parse_address
from kvtier.wire.prompt_news import prompt_id_in

logger = logging.getLogger("vllm.kvtier")


def prompt_reports(
    vllm_config: VllmConfig, config: KVCacheConfig, settings: ConnectorSettings, pool: BlockPool
) -> PromptReports | None:
    """None if they are not wanted, or cannot be made: then the HTTP server's own record is all it has."""
    if settings.prompt_events is None:
        return None
    groups = [
        number
        for number, group in enumerate(config.kv_cache_groups)
        if _is_full(group.kv_cache_spec) and group.kv_cache_spec.block_size == pool.hash_block_size
    ]
    if not groups or vllm_config.parallel_config.data_parallel_size > 1:
        logger.info("kvtier does not report which prompts are cached: not for this model, or several caches")
        return None
    address = parse_address(settings.prompt_events)
    assert isinstance(address, UnixAddress), "its settings check it"
    try:
        return PromptReports(address, pool, groups)
    except ConfigError as error:
        logger.warning("kvtier does not report which prompts are cached: %s", error)
        return None


class PromptReports:
    """Called by the scheduler's thread; the pool is also read by another, which sees each page there or not."""

    def __init__(self, address: UnixAddress, pool: BlockPool, groups: list[int]) -> None:
        """Raises `ConfigError`."""
        self._page_tokens = pool.hash_block_size
        self._events = PromptEvents(address, lambda page: pool.get_cached_block(page, groups) is not None)

    def note(self, request: Request) -> None:
        prompt_id = prompt_id_in(request.request_id)
        if prompt_id is None:
            return
        pages = request.block_hashes[: request.num_prompt_tokens // self._page_tokens]
        if pages:
            self._events.note(Prompt.of(prompt_id, pages, self._page_tokens), _computed(request))

    def close(self) -> None:
        self._events.close()


def _computed(request: Request) -> Callable[[], bool]:
    return lambda: request.num_computed_tokens >= request.num_prompt_tokens or request.is_finished()


def _is_full(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(_is_full(one) for one in spec.kv_cache_specs.values())
    return isinstance(spec, FullAttentionSpec)
