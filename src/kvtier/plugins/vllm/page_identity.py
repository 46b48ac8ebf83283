"""Whose pages those of vLLM's own offloading are: opaque bytes, shared by engines that would write the same ones.

Everything that may change a page's bytes or their order is in the namespace: the weights and the config, as for the
connector's blocks, and vLLM's version, device, layout, groups, sizes and ranks. The tokens are in vLLM's own hash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.blocks.full_identity import IdentityKind
from kvtier.blocks.layout import OpaqueLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.plugins.vllm.identity import fields_of, name_of, page_device

HASH_ALGORITHM = "sha256_cbor"
"""The only one of vLLM's whose hashes are the same in every process and of every version of Python."""

_RANKS = (
    "world_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What a page is, whose it is, and what people call it."""

    layout: OpaqueLayout
    fields: NamespaceFields
    name: str


def why_no_pages(vllm_config: VllmConfig) -> str | None:
    """Why no page of this engine can be kept; None when it can."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        return (
            f"its hashes are {algorithm}, which others cannot rely on: set --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if vllm_config.lora_config is not None:
        return "its hashes know LoRA adapters by name only (KvtierConnector tells them by their weights)"
    return None


def page_identity(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    page_bytes: int,
    blocks_per_page: int,
    salt: str,
    kind: IdentityKind,
) -> PageIdentity:
    """For an engine that `why_no_pages` has nothing against. Raises `ConfigError` when the weights cannot be found."""
    groups = kv_cache_config.kv_cache_groups
    tokens = blocks_per_page * groups[0].kv_cache_spec.block_size
    layout = OpaqueLayout(nbytes=page_bytes, block_tokens=tokens)
    fields = fields_of(vllm_config, layout, sum(len(group.layer_names) for group in groups), salt, kind)
    pages = {
        "vllm": vllm.__version__,
        "device": page_device(),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "layout": str(getattr(vllm_config.cache_config, "kv_cache_layout", None)),
        "groups": [[str(group.kv_cache_spec), list(group.layer_names)] for group in groups],
        "page_bytes": page_bytes,
        "blocks_per_page": blocks_per_page,
        "ranks": [getattr(vllm_config.parallel_config, name, 1) for name in _RANKS],
        "is_canonical": _is_canonical(vllm_config),
    }
    fields = replace(fields, model_config={"model": fields.model_config, "vllm_pages": pages})
    return PageIdentity(layout, fields, name_of(vllm_config))


def _is_canonical(vllm_config: VllmConfig) -> bool:
    extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return bool(extra.get("canonical_layout", False))
