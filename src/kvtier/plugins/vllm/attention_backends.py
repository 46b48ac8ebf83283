"""The attention backends that vLLM has chosen for an engine's layers: each orders the inside of a page its own way.

Workers have the layers. A scheduler in the same process sees them too; in another process it gets the names by vLLM's
handshake between connectors, before the first request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class LayerBackends(KVConnectorHandshakeMetadata):
    """The backend class of each layer with a KV cache, in the order of the groups. Picklable."""

    names: tuple[str, ...]


def backends_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> LayerBackends | None:
    """The backends in use; None where this process does not have the layers."""
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)  # type: ignore[type-abstract]
    if not names or any(name not in layers for name in names):
        return None
    backends = [layers[name].get_attn_backend() for name in names]
    return LayerBackends(tuple(f"{backend.__module__}.{backend.__qualname__}" for backend in backends))


def common_backends(ranks: Iterable[KVConnectorHandshakeMetadata]) -> LayerBackends | None:
    """The backends that all ranks report; None where they report different ones, or another connector's metadata."""
    reported = list(ranks)
    first = reported[0] if reported else None
    return first if isinstance(first, LayerBackends) and all(one == first for one in reported) else None
