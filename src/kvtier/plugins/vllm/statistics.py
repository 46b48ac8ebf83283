"""The connector's counters, as vLLM collects them for its log and its /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.transfer.hit_places import Place

_HELP = {
    "loaded_tokens_memory": "Prompt tokens loaded from the cache server's memory on this host",
    "loaded_tokens_disk": "Prompt tokens loaded from the cache server's disk",
    "loaded_tokens_cluster": "Prompt tokens loaded from the cluster below the cache server",
    "loaded_tokens_tcp": "Prompt tokens loaded from a cache server over TCP",
    "loaded_bytes": "Bytes loaded by this engine's ranks",
    "load_seconds": "Total time of loads",
    "failed_loads": "Loads that failed in part or entirely, and whose requests were computed",
    "stored_blocks": "Blocks stored in the cache",
    "refused_blocks": "Blocks that the cache refused",
    "late_matches": "Requests computed because the cache did not answer in time",
    "slower_loads": "Requests with cached tokens that were computed because that was faster than loading them",
}


@dataclass(slots=True)
class CacheStats:
    """Counts since the last `take_stats`."""

    loaded_tokens_memory: int = 0
    loaded_tokens_disk: int = 0
    loaded_tokens_cluster: int = 0
    loaded_tokens_tcp: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    failed_loads: int = 0
    stored_blocks: int = 0
    refused_blocks: int = 0
    late_matches: int = 0
    slower_loads: int = 0

    def count_loaded(self, place: Place, num_tokens: int) -> None:
        name = f"loaded_tokens_{place}"
        setattr(self, name, getattr(self, name) + num_tokens)

    def to_vllm(self) -> KvtierStats | None:
        """None if all counts are zero, as in most steps."""
        if self == _NOTHING:
            return None
        counts = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name)}
        return KvtierStats(data=counts)


_NOTHING = CacheStats()


class KvtierStats(KVConnectorStats):
    """`data` has the non-zero counts of `CacheStats`."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KvtierPromMetrics(KVConnectorPromMetrics):
    """A counter `vllm:kvtier_..._total` for each count and engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(f"vllm:kvtier_{name}", f"{text}.", labelnames) for name, text in _HELP.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)
