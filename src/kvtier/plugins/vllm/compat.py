"""Differences between the releases of vLLM that the connector and the tier support.

| needed | since | before that |
|---|---|---|
| `CacheHitSource` | 0.32 | vLLM does not ask where hits come from |
| saves in steps that compute nothing | 0.31 | `wait_for_save` is not called in such steps |
| a tier's `backpressure_detector` | 0.31 | tiers are made without |
| `KVConnectorTransferResults` | 0.30 | `get_finished` returns the two sets |
| `bind_kv_cache_manager` | 0.30 | never called; only models with several groups need the manager |
| `chunk_ids` of a tier's job | 0.30 | `block_ids` |
| pages of all scheduled requests (`KVConnectorBlockState`) | 0.30 | windows, states and several groups are not cached |

Detected without a release number: whether hashes have the same seed in every process, the media, the fields of events
and of the results of a tier's jobs, and whether a tier receives the engine's config.
"""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output
from vllm.v1.kv_offload import base as kv_offload

from kvtier.plugins.vllm.releases import release_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:

        class CacheHitSource(enum.Enum):
            HOST = enum.auto()
            DISK = enum.auto()

    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    except ImportError:

        @dataclass
        class KVConnectorTransferResults:
            finished_sending: set[str] = field(default_factory=set)
            finished_recving: set[str] = field(default_factory=set)
            failed_recving: set[str] = field(default_factory=set)


SAVES_IN_IDLE_STEPS = release_of(vllm.__version__) >= (0, 31)
"""vLLM also asks for saves in steps that compute nothing."""

HIT_SOURCES = {
    "server": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "cluster": getattr(CacheHitSource, "EXTERNAL_UNSPECIFIED", CacheHitSource.DISK),
}
"""vLLM's names of the tiers that tokens come from; it has none for a remote store."""
TIER_MEDIUM = kv_offload.Medium.STORAGE if hasattr(kv_offload, "Medium") else None

_T = TypeVar("_T")


def has_stable_hashes() -> bool:
    """Whether vLLM's cryptographic hashes are the same in every process; otherwise `PYTHONHASHSEED` must be set."""
    return hasattr(kv_cache_utils, "resolve_none_hash_seed") or os.getenv("PYTHONHASHSEED") is not None


def configs_of(spec: Any) -> tuple[Any, Any] | None:
    """The engine's config and its KV cache config, for which vLLM made this offloading spec; None if not found.

    If the spec does not have them, they are local variables of the function that creates the tiers. A caller is
    trusted only if it has this very spec.
    """
    if hasattr(spec, "vllm_config") and hasattr(spec, "kv_cache_config"):
        return spec.vllm_config, spec.kv_cache_config
    frame = inspect.currentframe()
    while frame is not None:
        names = frame.f_locals
        if names.get("spec") is spec and "vllm_config" in names and "kv_cache_config" in names:
            return names["vllm_config"], names["kv_cache_config"]
        frame = frame.f_back
    return None


def blocks_per_page(spec: Any) -> int:
    """The number of vLLM's blocks that its offloading moves as one page."""
    return int(spec.blocks_per_chunk if hasattr(spec, "blocks_per_chunk") else spec.block_size_factor)


def rows_of(job: Any) -> list[int]:
    """The rows of a job's pages in the memory of vLLM's own offloading."""
    rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(row) for row in rows]


def made_with_known(maker: type[_T], named: Mapping[str, Any]) -> _T:
    """An object made with the fields that this release has; others are left out."""
    known = getattr(maker, "__struct_fields__", None) or [one.name for one in fields(maker)]  # type: ignore[arg-type]
    return maker(**{name: value for name, value in named.items() if name in known})


def known_arguments(call: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `named` that are parameters of `call`."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in named.items() if name in known}


def event_extra_keys(keys: Sequence[tuple[Any, ...] | None]) -> Any:
    """The extra keys of blocks as events have them: newer releases leave out the kinds that hashes have."""
    if hasattr(kv_cache_utils, "to_event_extra_keys"):
        return kv_cache_utils.to_event_extra_keys(keys)
    return list(keys)


def kind_of(spec: Any) -> str | None:
    """The name of this kind of KV cache in events; None in releases without such names."""
    if not hasattr(kv_cache_interface, "get_kv_cache_spec_kind"):
        return None
    return str(kv_cache_interface.get_kv_cache_spec_kind(spec).value)


def window_of(spec: Any) -> int | None:
    """The sliding window of this kind of KV cache in events; None without one, or in releases that do not name it."""
    if not hasattr(kv_cache_interface, "get_kv_cache_spec_sliding_window"):
        return None
    found = kv_cache_interface.get_kv_cache_spec_sliding_window(spec)
    return None if found is None else int(found)


HANDS_OVER_STATES = hasattr(output, "KVConnectorBlockState") and hasattr(output.KVConnectorBlockState, "get_block_ids")
"""vLLM reports the pages of each scheduled request by group, and which of them have complete states."""

__all__ = [
    "HANDS_OVER_STATES",
    "HIT_SOURCES",
    "CacheHitSource",
    "KVConnectorTransferResults",
    "SAVES_IN_IDLE_STEPS",
    "TIER_MEDIUM",
    "blocks_per_page",
    "configs_of",
    "event_extra_keys",
    "has_stable_hashes",
    "kind_of",
    "known_arguments",
    "made_with_known",
    "rows_of",
    "window_of",
]
