"""The namespace of pages of vLLM's own offloading: opaque bytes, shared by engines that would write the same.

It covers everything that may change a page's bytes or their order: weights and config, as for the connector's blocks,
and vLLM's version, device, attention backends, layout, groups, sizes and ranks. Tokens are in vLLM's own hash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.blocks.full_identity import IdentityKind
from kvtier.blocks.layout import OpaqueLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.errors import ConfigError
from kvtier.plugins.vllm.attention_backends import backends_of
from kvtier.plugins.vllm.identity import fields_of, name_of, page_device

HASH_ALGORITHM = "sha256_cbor"
"""vLLM's only algorithm whose hashes are the same in every process and version of Python."""

_RANKS = (
    "world_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """A page's layout, its namespace and the model's name."""

    layout: OpaqueLayout
    fields: NamespaceFields
    name: str


def why_no_pages(vllm_config: VllmConfig) -> str | None:
    """Why no page of this engine can be kept; None if pages can be."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        setting = f"set --prefix-caching-hash-algo {HASH_ALGORITHM}"
        return f"its hashes are {algorithm}, which differ between processes: {setting}"
    if vllm_config.lora_config is not None:
        return "its hashes identify LoRA adapters by name only (KvtierConnector identifies them by their weights)"
    return None


def page_identity(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    page_bytes: int,
    blocks_per_page: int,
    salt: str,
    kind: IdentityKind,
) -> PageIdentity:
    """The identity of an engine's pages, if `why_no_pages` returned None.

    Raises `ConfigError` when the weights cannot be found, or the attention backends are not known.
    """
    groups = kv_cache_config.kv_cache_groups
    tokens = blocks_per_page * groups[0].kv_cache_spec.block_size
    layout = OpaqueLayout(nbytes=page_bytes, block_tokens=tokens)
    fields = fields_of(vllm_config, layout, sum(len(group.layer_names) for group in groups), salt, kind)
    pages = {
        "vllm": vllm.__version__,
        "device": page_device(),
        "attention": _attention_of(vllm_config, kv_cache_config),
        "layout": str(getattr(vllm_config.cache_config, "kv_cache_layout", None)),
        "groups": [[str(group.kv_cache_spec), list(group.layer_names)] for group in groups],
        "page_bytes": page_bytes,
        "blocks_per_page": blocks_per_page,
        "ranks": [getattr(vllm_config.parallel_config, name, 1) for name in _RANKS],
        "is_canonical": _is_canonical(vllm_config),
    }
    fields = replace(fields, model_config={"model": fields.model_config, "vllm_pages": pages})
    return PageIdentity(layout, fields, name_of(vllm_config))


def _attention_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """The attention backends, which order the inside of a page.

    A tier cannot ask workers in other processes. What they use then follows from the configured backend, or on a CPU
    from the device. Raises `ConfigError` where it does not.
    """
    backends = backends_of(vllm_config, kv_cache_config)
    if backends is not None:
        return list(backends.names)
    config = getattr(vllm_config, "attention_config", None)
    configured = getattr(config, "backend", None)
    if configured is None and not current_platform.is_cpu():
        raise ConfigError("its workers choose an attention backend by themselves: set --attention-backend")
    return ["configured", str(configured), str(getattr(config, "backend_per_kind", None))]


def _is_canonical(vllm_config: VllmConfig) -> bool:
    extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return bool(extra.get("canonical_layout", False))
