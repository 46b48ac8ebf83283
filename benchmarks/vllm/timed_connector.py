"""`KvtierConnector` that measures the time of vLLM's scheduler and worker threads in it.

vLLM loads it by `kv_connector_module_path` into the processes of its engine. When the engine shuts down, each side
writes its times to the folder that the environment names.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.plugins.vllm.connector import KvtierConnector

FOLDER_VARIABLE = "KVTIER_BENCH_STEP_TIMES"

_SCHEDULER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "build_connector_meta",
)
_WORKER_CALLS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_transfer_results",
)
_LAST_CALLS = ("build_connector_meta", "get_transfer_results")
"""vLLM calls one of these in every step of its scheduler, the other in every step of a worker."""


class TimedKvtierConnector(KvtierConnector):
    """`steps_s` has one entry a step: the time of all calls since the step before."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._side = role.name.lower()
        self._depth = 0
        self._step_s = 0.0
        self._steps_s: list[float] = []
        self._calls_s: dict[str, float] = {}
        super().__init__(vllm_config, role, kv_cache_config)

    def shutdown(self) -> None:
        document = {"steps_s": self._steps_s, "calls_s": self._calls_s}
        file = Path(os.environ[FOLDER_VARIABLE], f"{self._side}.json")
        file.with_suffix(".new").write_text(json.dumps(document))
        file.with_suffix(".new").rename(file)
        super().shutdown()


def _timed(name: str) -> Callable[..., Any]:
    inner = getattr(KvtierConnector, name)

    @functools.wraps(inner)
    def call(self: TimedKvtierConnector, *arguments: Any, **named: Any) -> Any:
        if self._depth:  # one of these calls another
            return inner(self, *arguments, **named)
        self._depth = 1
        started_at = time.perf_counter()
        try:
            return inner(self, *arguments, **named)
        finally:
            elapsed = time.perf_counter() - started_at
            self._depth = 0
            self._step_s += elapsed
            self._calls_s[name] = self._calls_s.get(name, 0.0) + elapsed
            if name in _LAST_CALLS:
                self._steps_s.append(self._step_s)
                self._step_s = 0.0

    return call


for _name in _SCHEDULER_CALLS + _WORKER_CALLS:
    setattr(TimedKvtierConnector, _name, _timed(_name))
