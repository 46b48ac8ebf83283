"""All metrics that kvtier exports, by name. They are passed in as objects: two servers in a process do not collide."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SERVER_REQUESTS = "kvtier_server_requests"
SERVER_REQUEST_SECONDS = "kvtier_server_request_seconds"
SERVER_REFUSALS = "kvtier_server_refusals"
SERVER_HIT_BLOCKS = "kvtier_server_hit_blocks"
SERVER_MISSED_BLOCKS = "kvtier_server_missed_blocks"
SERVER_STORED_BLOCKS = "kvtier_server_stored_blocks"
SERVER_SENT_BYTES = "kvtier_server_sent_bytes"
SERVER_RECEIVED_BYTES = "kvtier_server_received_bytes"
SERVER_DISK_LOSSES = "kvtier_server_disk_losses"
SERVER_CLUSTER_LOSSES = "kvtier_server_cluster_losses"
SERVER_LEVELS = "kvtier_server_"
SERVER_TENANT_LEVELS = "kvtier_server_tenant_"

TIER_HIT_BLOCKS = "kvtier_tier_hit_blocks"
TIER_MISSED_BLOCKS = "kvtier_tier_missed_blocks"
TIER_STORED_BLOCKS = "kvtier_tier_stored_blocks"
TIER_REFUSED_BLOCKS = "kvtier_tier_refused_blocks"
TIER_FAILURES = "kvtier_tier_failures"
TIER_LOADED_BYTES = "kvtier_tier_loaded_bytes"
TIER_LOAD_SECONDS = "kvtier_tier_load_seconds"
TIER_STORED_BYTES = "kvtier_tier_stored_bytes"
TIER_STORE_SECONDS = "kvtier_tier_store_seconds"

ENGINE_STEPS = "kvtier_engine_steps"
ENGINE_PROMPT_TOKENS = "kvtier_engine_prompt_tokens"
ENGINE_CACHED_TOKENS = "kvtier_engine_cached_tokens"
ENGINE_OUTPUT_TOKENS = "kvtier_engine_output_tokens"
ENGINE_SAVED_SECONDS = "kvtier_engine_saved_seconds"
ENGINE_UNVALUED_TOKENS = "kvtier_engine_unvalued_tokens"
ENGINE_FINISHED_REQUESTS = "kvtier_engine_finished_requests"
ENGINE_PREEMPTIONS = "kvtier_engine_preemptions"
ENGINE_RUNNING_REQUESTS = "kvtier_engine_running_requests"
ENGINE_WAITING_REQUESTS = "kvtier_engine_waiting_requests"
ENGINE_USED_BLOCKS = "kvtier_engine_used_blocks"
ENGINE_HELD_BLOCKS = "kvtier_engine_held_blocks"
ENGINE_BLOCKS = "kvtier_engine_blocks"
ENGINE_CANARY_CHECKS = "kvtier_engine_canary_checks"
ENGINE_LOADING_OFF = "kvtier_engine_loading_off"
ENGINE_COMPARED_PROMPTS = "kvtier_engine_compared_prompts"
ENGINE_PARTED_HEADS = "kvtier_engine_parted_heads"

API_REQUESTS = "kvtier_api_requests"
API_TTFT_SECONDS = "kvtier_api_ttft_seconds"
API_TPOT_SECONDS = "kvtier_api_tpot_seconds"
API_PROMPT_TOKENS = "kvtier_api_prompt_tokens"
API_OUTPUT_TOKENS = "kvtier_api_output_tokens"
API_CACHED_TOKENS = "kvtier_api_cached_tokens"
API_KEY_REQUESTS = "kvtier_api_key_requests"
API_KEY_TOKENS = "kvtier_api_key_tokens"
API_WRONG_KEYS = "kvtier_api_wrong_keys"
API_ENGINE_UP = "kvtier_api_engine_up"
API_ENGINE_STARTS = "kvtier_api_engine_starts"
API_ENGINE_REQUESTS = "kvtier_api_engine_requests"
API_ROUTED_REQUESTS = "kvtier_api_routed_requests"
API_RETRIED_REQUESTS = "kvtier_api_retried_requests"

_COUNTED_LEVELS = {
    "evicted_blocks": "Blocks evicted to make room.",
    "altered_blocks": "Blocks dropped because a client wrote to them after they were committed.",
}
_SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_TTFT_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_TPOT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0)


class ServerMetrics:
    """The cache server's metrics. Levels (bytes used, leases, ...) and losses by kind are read at each scrape."""

    def __init__(
        self,
        levels: Callable[[], Mapping[str, float]],
        losses: Callable[[], Mapping[str, int]] = dict,
        tenants: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        cluster_losses: Callable[[], Mapping[str, int]] = dict,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`tenants` returns levels by tenant; each tenant becomes a label."""
        self.registry = CollectorRegistry() if registry is None else registry
        self.requests = Counter(SERVER_REQUESTS, "Requests by operation.", ["operation"], registry=self.registry)
        self.request_seconds = Histogram(
            SERVER_REQUEST_SECONDS,
            "Time from a request's last byte to its reply's.",
            ["operation"],
            buckets=_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.refusals = Counter(SERVER_REFUSALS, "Requests refused, by kind.", ["kind"], registry=self.registry)
        self.hit_blocks = Counter(SERVER_HIT_BLOCKS, "Blocks matched or sent.", registry=self.registry)
        self.missed_blocks = Counter(SERVER_MISSED_BLOCKS, "Blocks requested and not found.", registry=self.registry)
        self.stored_blocks = Counter(SERVER_STORED_BLOCKS, "Blocks committed.", registry=self.registry)
        self.sent_bytes = Counter(SERVER_SENT_BYTES, "Block bytes sent over sockets.", registry=self.registry)
        self.received_bytes = Counter(
            SERVER_RECEIVED_BYTES, "Block bytes received over sockets.", registry=self.registry
        )
        self.registry.register(_Levels(levels, losses, tenants, cluster_losses))


class _Levels(Collector):
    def __init__(
        self,
        levels: Callable[[], Mapping[str, float]],
        losses: Callable[[], Mapping[str, int]],
        tenants: Callable[[], Mapping[str, Mapping[str, float]]],
        cluster_losses: Callable[[], Mapping[str, int]],
    ) -> None:
        self._levels = levels
        self._losses = losses
        self._tenants = tenants
        self._cluster_losses = cluster_losses

    def collect(self) -> Iterator[Metric]:
        lost = CounterMetricFamily(
            SERVER_DISK_LOSSES, "Blocks lost on disk, and its failures, by kind.", labels=["kind"]
        )
        for kind, count in self._losses().items():
            lost.add_metric([kind], count)
        yield lost
        lost = CounterMetricFamily(
            SERVER_CLUSTER_LOSSES, "Blocks lost in the cluster, and its failures, by kind.", labels=["kind"]
        )
        for kind, count in self._cluster_losses().items():
            lost.add_metric([kind], count)
        yield lost
        for name, value in self._levels().items():
            if name in _COUNTED_LEVELS:
                family: Metric = CounterMetricFamily(SERVER_LEVELS + name, _COUNTED_LEVELS[name], value=value)
            else:
                family = GaugeMetricFamily(SERVER_LEVELS + name, f"{name.replace('_', ' ')} now.", value=value)
            yield family
        families: dict[str, GaugeMetricFamily] = {}
        for tenant, levels in self._tenants().items():
            for name, value in levels.items():
                if name not in families:
                    help_text = f"{name.replace('_', ' ')} now, by tenant."
                    families[name] = GaugeMetricFamily(SERVER_TENANT_LEVELS + name, help_text, labels=["tenant"])
                families[name].add_metric([tenant], value)
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        return ()


class TierMetrics:
    """Counters of a client of tiers, by tier. One object per process is enough; a dead tier shows in `failures`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.hit_blocks = Counter(TIER_HIT_BLOCKS, "Blocks found.", ["tier"], registry=self.registry)
        self.missed_blocks = Counter(TIER_MISSED_BLOCKS, "Blocks not found.", ["tier"], registry=self.registry)
        self.stored_blocks = Counter(TIER_STORED_BLOCKS, "Blocks stored.", ["tier"], registry=self.registry)
        self.refused_blocks = Counter(
            TIER_REFUSED_BLOCKS,
            "Blocks offered and not stored for lack of room.",
            ["tier"],
            registry=self.registry,
        )
        self.failures = Counter(TIER_FAILURES, "Failed calls by kind.", ["tier", "kind"], registry=self.registry)
        self.loaded_bytes = Counter(TIER_LOADED_BYTES, "Bytes loaded to a device.", ["tier"], registry=self.registry)
        self.load_seconds = Counter(TIER_LOAD_SECONDS, "Time that loads took.", ["tier"], registry=self.registry)
        self.stored_bytes = Counter(TIER_STORED_BYTES, "Bytes stored.", ["tier"], registry=self.registry)
        self.store_seconds = Counter(TIER_STORE_SECONDS, "Time that stores took.", ["tier"], registry=self.registry)

    def value(self, counter: Counter, **labels: str) -> float:
        """A counter's value, for tests and interactive use."""
        wanted = {str(key): str(value) for key, value in labels.items()}
        return sum(
            sample.value
            for metric in counter.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and wanted.items() <= sample.labels.items()
        )


@dataclass(slots=True)
class EngineCounts:
    """Counts of an engine's work, and its levels, as plain numbers, which cost its thread next to nothing.

    The engine's thread updates them, any thread may read. A prompt counts once per answer, when the answer ends.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """By tier."""
    output_tokens: int = 0
    saved_s: float = 0.0
    """Time that computing the cached tokens would have taken, at the measured speed; 0 without tiers."""
    unvalued_tokens: int = 0
    """Cached tokens that are not in `saved_s`, as no step large enough to judge by was measured yet."""
    finished_requests: dict[str, int] = field(default_factory=dict)
    """By reason."""
    num_preemptions: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    held_blocks: int = 0
    """In use, or kept for later prompts."""
    num_blocks: int = 0
    canary_checks: dict[str, int] = field(default_factory=dict)
    """By result."""
    is_loading_off: bool = False

    def note_check(self, result: str) -> None:
        self.canary_checks[result] = self.canary_checks.get(result, 0) + 1

    def note_end(self, reason: str, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        self.finished_requests[reason] = self.finished_requests.get(reason, 0) + 1
        self.prompt_tokens += prompt_tokens
        for tier, count in cached_tokens.items():
            self.cached_tokens[tier] = self.cached_tokens.get(tier, 0) + count


class EngineMetrics:
    """The metrics of one engine, read at each scrape."""

    def __init__(self, counts: EngineCounts, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(_EngineCollector(counts))


class _EngineCollector(Collector):
    def __init__(self, counts: EngineCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        yield CounterMetricFamily(ENGINE_STEPS, "Steps handed to the device.", value=counts.num_steps)
        yield CounterMetricFamily(ENGINE_PROMPT_TOKENS, "Tokens of prompts.", value=counts.prompt_tokens)
        yield CounterMetricFamily(ENGINE_OUTPUT_TOKENS, "Tokens sampled for answers.", value=counts.output_tokens)
        yield CounterMetricFamily(
            ENGINE_SAVED_SECONDS, "Time that computing the cached tokens would have taken.", value=counts.saved_s
        )
        yield GaugeMetricFamily(
            ENGINE_UNVALUED_TOKENS,
            "Cached tokens that are not in the saved time, as the speed is not measured yet.",
            value=counts.unvalued_tokens,
        )
        yield CounterMetricFamily(ENGINE_PREEMPTIONS, "Requests that had to start over.", value=counts.num_preemptions)
        cached = CounterMetricFamily(
            ENGINE_CACHED_TOKENS, "Tokens of prompts that were not computed, by tier.", labels=["tier"]
        )
        for tier, count in dict(counts.cached_tokens).items():
            cached.add_metric([tier], count)
        yield cached
        finished = CounterMetricFamily(
            ENGINE_FINISHED_REQUESTS, "Answers that have ended, by reason.", labels=["reason"]
        )
        for reason, count in dict(counts.finished_requests).items():
            finished.add_metric([reason], count)
        yield finished
        yield GaugeMetricFamily(ENGINE_RUNNING_REQUESTS, "Answers being computed.", value=counts.running_requests)
        yield GaugeMetricFamily(
            ENGINE_WAITING_REQUESTS, "Answers waiting to be computed.", value=counts.waiting_requests
        )
        yield GaugeMetricFamily(ENGINE_USED_BLOCKS, "KV blocks in use.", value=counts.used_blocks)
        yield GaugeMetricFamily(
            ENGINE_HELD_BLOCKS, "KV blocks in use, or kept for later prompts.", value=counts.held_blocks
        )
        yield GaugeMetricFamily(ENGINE_BLOCKS, "KV blocks in total.", value=counts.num_blocks)
        checks = CounterMetricFamily(
            ENGINE_CANARY_CHECKS, "Runs of loaded blocks that the canary computed again, by result.", labels=["result"]
        )
        for result, count in dict(counts.canary_checks).items():
            checks.add_metric([result], count)
        yield checks
        yield GaugeMetricFamily(
            ENGINE_LOADING_OFF,
            "1 once the canary has found wrong KV: nothing is loaded from the tiers.",
            value=float(counts.is_loading_off),
        )

    def describe(self) -> Iterable[Metric]:
        return ()


class PartingMetrics:
    """Counts of prompts compared with earlier ones. Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._lock = threading.Lock()
        self._compared: dict[str, int] = {}
        self._heads: dict[str, int] = {}
        self.registry.register(_PartingCollector(self._compared, self._heads))

    def note(self, how: str, causes_of_head: Sequence[str]) -> None:
        """Count a compared prompt, and the causes if it parted near its head."""
        with self._lock:
            self._compared[how] = self._compared.get(how, 0) + 1
            for cause in causes_of_head:
                self._heads[cause] = self._heads.get(cause, 0) + 1


class _PartingCollector(Collector):
    def __init__(self, compared: Mapping[str, int], heads: Mapping[str, int]) -> None:
        self._compared = compared
        self._heads = heads

    def collect(self) -> Iterator[Metric]:
        compared = CounterMetricFamily(
            ENGINE_COMPARED_PROMPTS, "Prompts, by their relation to recorded ones.", labels=["how"]
        )
        for how, count in dict(self._compared).items():
            compared.add_metric([how], count)
        yield compared
        heads = CounterMetricFamily(
            ENGINE_PARTED_HEADS, "Prompts that parted from recorded ones near their head, by cause.", labels=["cause"]
        )
        for cause, count in dict(self._heads).items():
            heads.add_metric([cause], count)
        yield heads

    def describe(self) -> Iterable[Metric]:
        return ()


class ApiMetrics:
    """The HTTP server's metrics. Tokens and times are those of complete answers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.requests = Counter(
            API_REQUESTS, "Requests by API, path and status.", ["api", "path", "status"], registry=self.registry
        )
        self.ttft_seconds = Histogram(
            API_TTFT_SECONDS, "Time to the first token.", ["model"], buckets=_TTFT_BUCKETS, registry=self.registry
        )
        self.tpot_seconds = Histogram(
            API_TPOT_SECONDS,
            "Time per output token after the first, of answers of two tokens or more.",
            ["model"],
            buckets=_TPOT_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(API_PROMPT_TOKENS, "Tokens of prompts.", ["model"], registry=self.registry)
        self.output_tokens = Counter(API_OUTPUT_TOKENS, "Tokens of answers.", ["model"], registry=self.registry)
        self.key_requests = Counter(
            API_KEY_REQUESTS, "Requests by the name of their API key.", ["key"], registry=self.registry
        )
        self.key_tokens = Counter(
            API_KEY_TOKENS,
            "Tokens by the name of the API key, of prompts or answers.",
            ["key", "of"],
            registry=self.registry,
        )
        self.wrong_keys = Counter(API_WRONG_KEYS, "Requests with an unknown API key.", registry=self.registry)
        self.engine_up = Gauge(API_ENGINE_UP, "Whether an engine of vLLM answers.", ["engine"], registry=self.registry)
        self.engine_starts = Counter(
            API_ENGINE_STARTS,
            "How often an engine of vLLM has started, as seen by this server.",
            ["engine"],
            registry=self.registry,
        )
        self.engine_requests = Counter(
            API_ENGINE_REQUESTS, "Requests sent to an engine of vLLM.", ["engine"], registry=self.registry
        )
        self.routed_requests = Counter(
            API_ROUTED_REQUESTS,
            "Requests for a model on vLLM, by the reason for the choice of engine: the longest prefix seen, or load.",
            ["model", "by"],
            registry=self.registry,
        )
        self.retried_requests = Counter(
            API_RETRIED_REQUESTS,
            "Requests sent to another engine of vLLM because the first one was lost.",
            ["model"],
            registry=self.registry,
        )
        self.cached_tokens = Counter(
            API_CACHED_TOKENS,
            "Tokens of prompts that were not computed, by tier.",
            ["model", "tier"],
            registry=self.registry,
        )
