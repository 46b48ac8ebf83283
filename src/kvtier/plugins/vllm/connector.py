"""`KvtierConnector`: passes vLLM's calls to the scheduler's or the worker's side.

If an engine's KV cannot be cached, the connector logs the reason once and does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError
from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.plugins.vllm.attention_backends import LayerBackends, backends_of, common_backends
from kvtier.plugins.vllm.compat import SAVES_IN_IDLE_STEPS, CacheHitSource, KVConnectorTransferResults
from kvtier.plugins.vllm.events import server_events
from kvtier.plugins.vllm.group_scheduling import GroupSchedulerSide
from kvtier.plugins.vllm.identity import Identity, identity_of, is_own_format
from kvtier.plugins.vllm.plan import StepPlan
from kvtier.plugins.vllm.prompt_reports import PromptReports, prompt_reports
from kvtier.plugins.vllm.scheduling import SchedulerSide
from kvtier.plugins.vllm.server_client import client_of
from kvtier.plugins.vllm.settings import read_settings
from kvtier.plugins.vllm.statistics import KvtierPromMetrics, KvtierStats
from kvtier.plugins.vllm.working import WorkerSide

logger = logging.getLogger("vllm.kvtier")
"""A child of vLLM's logger: other loggers are not shown."""


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in a kvtier cache server, on this host or over TCP, where it outlives vLLM's own cache."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises `ConfigError` with one sentence for settings that cannot work."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._settings = read_settings(transfer.kv_connector_extra_config)
        if self._settings.whole_prompts and vllm_config.speculative_config is not None:
            raise ConfigError("kvtier: whole_prompts does not go with speculative decoding: leave one of them out")
        self._config = kv_cache_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._server: EmbeddedServer | None = None
        self._pool: BlockPool | None = None
        self._manager: KVCacheManager | None = None
        self._prompts: PromptReports | None = None
        self._is_own_format = is_own_format(kv_cache_config)
        self._backends = backends_of(vllm_config, kv_cache_config)
        self._awaits_backends = role is KVConnectorRole.SCHEDULER and self._backends is None and not self._is_own_format
        if not self._awaits_backends:
            self._open(self._backends)

    def _open(self, backends: LayerBackends | None) -> None:
        """Connect to the cache server and start this object's side. Raises `ConfigError` as the constructor does."""
        vllm_config, settings = self._vllm_config, self._settings
        try:
            identity = identity_of(vllm_config, self._config, settings.salt, settings.identity, backends=backends)
        except ConfigError as error:
            logger.warning("kvtier keeps nothing of this model: %s", error)
            return
        settings.check_room_for(identity.layout)
        self._server = settings.embedded_server()
        try:
            client = client_of(settings, identity, self._server)
        except BaseException:
            self.shutdown()
            raise
        if identity.num_ranks > 1 and not client.is_local:
            client.close()
            self.shutdown()
            logger.warning("kvtier keeps nothing of this engine: several ranks need a cache server on their host")
            return
        if self.role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._new_scheduler(client, identity)
        else:
            self._worker = WorkerSide(client, identity, get_tensor_model_parallel_rank())

    def _new_scheduler(self, client: CacheClient, identity: Identity) -> SchedulerSide:
        vllm_config, settings = self._vllm_config, self._settings
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "kvtier: set kv_load_failure_policy to recompute: with %r a block that is lost fails its request",
                transfer.kv_load_failure_policy,
            )
        chunk_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        logger.info("kvtier caches through %s (kvtier explain REQUEST_ID --server %s)", *[client.address] * 2)
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        logger.info("kvtier keeps %s", identity.description)
        events = server_events(vllm_config, self._config, client, identity)
        side = SchedulerSide if identity.block_groups.is_one_full else GroupSchedulerSide
        return side(client, identity, settings, chunk_tokens, algorithm, events)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """On a GPU, a layout in which a block is one run of bytes, as in the cache. vLLM uses another if it must."""
        return "BLHNC" if current_platform.is_cuda_alike() else None

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The backends of all ranks. Raises `ConfigError` as the constructor does."""
        if not self._awaits_backends:
            return
        self._awaits_backends = False
        self._open(common_backends(metadata.values()))
        if self._scheduler is not None and self._manager is not None and self._pool is not None:
            self._scheduler.bind(self._pool)
            self._scheduler.bind_manager(self._manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        if self._prompts is None:
            self._prompts = prompt_reports(self._vllm_config, self._config, self._settings, gpu_block_pool)
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        if self._scheduler is not None:
            self._scheduler.bind_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        if self._prompts is not None:
            self._prompts.note(request)
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.num_matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()  # a list of every page of the request
            self._scheduler.note_allocated(request, tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return {} if self._scheduler is None else self._scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepPlan() if self._scheduler is None else self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.note_transfers(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler is not None and self._scheduler.finish(request), None

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._scheduler is None else self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        return None if self._scheduler is None else self._scheduler.reset()

    # --- worker ------------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """For a scheduler in another process. Other connectors beside this one would take it for theirs, so it is
        sent only where it is needed.
        """
        is_needed = not self._is_own_format and self._vllm_config.parallel_config.distributed_executor_backend != "uni"
        return self._backends if is_needed else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._plan(), asks_by_layer=_asks_by_layer())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            self._worker.drop_saves(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is None:
            return
        plan = self._plan()
        self._worker.start(plan)
        if plan.is_idle and not SAVES_IN_IDLE_STEPS:
            self._worker.save(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous, but the last bytes of one may arrive beside the step that uses it."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults() if self._worker is None else self._worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The results for releases of vLLM without `get_transfer_results`."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_bad_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.take_news()

    # --- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._scheduler or self._worker
        return None if side is None else side.take_stats().to_vllm()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        if self._prompts is not None:
            self._prompts.close()
        if self._server is not None:
            self._server.close()
        self._scheduler = self._worker = self._server = self._prompts = None

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan


def _asks_by_layer() -> bool:
    """Whether vLLM calls `wait_for_layer_load` in this step: its layers run one by one, not as one CUDA graph."""
    if not is_forward_context_available():
        return False
    context = get_forward_context()
    is_one_graph = context.cudagraph_runtime_mode is CUDAGraphMode.FULL
    return not is_one_graph and isinstance(context.attn_metadata, dict)
