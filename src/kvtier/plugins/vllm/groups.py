"""The groups of layers in which a vLLM engine keeps its KV: the reach of each, and the layout of its pages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.transfer.copiers.opaque_pages import PageRun, merged_runs
from kvtier.transfer.reach import AttentionKind, Reach

_KNOWN = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)


@dataclass(frozen=True, slots=True)
class Group:
    """`is_handed_over`: vLLM reports the page and the token of each complete state; otherwise pages are in the order of
    their tokens. `format` is a digest of the page's layout."""

    reach: Reach
    layer_names: tuple[str, ...]
    format: str
    is_latent: bool
    is_handed_over: bool

    @property
    def description(self) -> str:
        """A readable name."""
        reach = self.reach
        if reach.span_tokens:
            return f"{reach.attention.value} of {reach.span_tokens} tokens"
        return "latents (MLA)" if self.is_latent else reach.attention.value


def groups_of(config: KVCacheConfig) -> tuple[Group, ...] | str:
    """All groups; or the reason why vLLM would not reuse a prefix, or reuses it by unknown rules."""
    groups: list[Group] = []
    for group in config.kv_cache_groups:
        reach = _reach_of(group)
        if isinstance(reach, str):
            return reach
        specs = _layer_specs(group.kv_cache_spec)
        groups.append(
            Group(
                reach=reach,
                layer_names=tuple(group.layer_names),
                format=hashlib.sha256(repr(group.kv_cache_spec).encode()).hexdigest(),
                is_latent=all(isinstance(spec, MLAAttentionSpec) for spec in specs),
                is_handed_over=any(_mode_of(spec) == "align" for spec in specs),
            )
        )
    return tuple(groups) or "it has no KV cache"


def page_bytes_of(config: KVCacheConfig) -> int | None:
    """A page's bytes in one rank, over all layers; None if this release of vLLM does not report their layout."""
    runs: set[PageRun] = set()
    for tensor in config.kv_cache_tensors:
        if not hasattr(tensor, "layer_stride"):
            return None
        for number, name in enumerate(tensor.layers):
            spec = _spec_of(config, name)
            nbytes = math.prod((spec.num_heads, spec.num_states, spec.state_content_size_bytes))
            runs.add(PageRun(tensor.block_stride, tensor.offset + number * tensor.layer_stride, nbytes))
    return sum(run.nbytes for run in merged_runs(runs))


def _reach_of(group: KVCacheGroupSpec) -> Reach | str:
    reaches = {_reach_of_spec(spec) for spec in _layer_specs(group.kv_cache_spec)}
    if len(reaches) != 1:
        return "layers of one group of its KV cache differ in how far they look back"
    (reach,) = reaches
    is_replica = not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False)
    if reach is None or is_replica:
        name = type(next(iter(_layer_specs(group.kv_cache_spec)))).__name__
        return f"KV caches of the kind {name} are not supported"
    modes = {_mode_of(spec) for spec in _layer_specs(group.kv_cache_spec)}
    if reach.attention is AttentionKind.STATE and not modes <= {"align", "all"}:
        return "vLLM keeps no states of this model: see --enable-prefix-caching and --mamba-cache-mode"
    return reach


def _reach_of_spec(spec: KVCacheSpec) -> Reach | None:
    """None for kinds with unknown rules: subclasses of a known kind may have rules of their own."""
    is_known = type(spec) in _KNOWN or type(spec).__name__ == "SlidingWindowMLASpec"
    if not is_known or not getattr(spec, "prefix_cacheable", True) or getattr(spec, "non_causal", False):
        return None
    if isinstance(spec, MambaSpec):
        return Reach(AttentionKind.STATE, spec.block_size)
    if isinstance(spec, SlidingWindowSpec):
        num_more = getattr(spec, "extra_retained_tokens", 0)  # vLLM may keep a few tokens beyond the window
        return Reach(AttentionKind.WINDOW, spec.block_size, spec.sliding_window + num_more)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Reach(AttentionKind.CHUNK, spec.block_size, spec.attention_chunk_size)
    if isinstance(spec, FullAttentionSpec):
        return Reach(AttentionKind.FULL, spec.block_size)
    return None


def _mode_of(spec: KVCacheSpec) -> str:
    """Which states vLLM keeps (`mamba_cache_mode`)."""
    return str(getattr(spec, "mamba_cache_mode", "none"))


def _layer_specs(spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    return tuple(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def _spec_of(config: KVCacheConfig, layer_name: str) -> KVCacheSpec:
    group = next(group for group in config.kv_cache_groups if layer_name in group.layer_names)
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def descriptions(groups: Sequence[Group]) -> str:
    """A readable list of the groups."""
    return ", ".join(dict.fromkeys(group.description for group in groups))
