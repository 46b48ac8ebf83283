"""`KvtierConnector` in an engine that records the beginning and end of its work, for `benchmarks.vllm.timeline`.

vLLM loads it by `kv_connector_module_path`, into the process of its engine. Times are those of `time.monotonic`, which
all processes of a host share. They are written to the file that the environment names when the engine ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker import gpu_model_runner

from kvtier.plugins.vllm.connector import KvtierConnector
from kvtier.transfer.load_news import LoadNews
from kvtier.transfer.lookup import Lookups
from kvtier.transfer.worker_transfer import WorkerTransfer

FILE_VARIABLE = "KVTIER_BENCH_TIMELINE"


def _runners() -> list[type]:
    """vLLM has two classes of this name, and chooses by the model; the other may lack requirements."""
    runners: list[type] = [gpu_model_runner.GPUModelRunner]
    with contextlib.suppress(ImportError):
        runners.append(importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner)
    return runners


_WATCHED: tuple[tuple[type, str, str], ...] = (
    (EngineCore, "preprocess_add_request", "vLLM: a request is read and hashed"),
    (EngineCore, "add_request", "vLLM: a request is added"),
    (Scheduler, "schedule", "vLLM: schedule"),
    (Scheduler, "update_from_output", "vLLM: results are taken"),
    *((runner, "execute_model", "vLLM: a step is queued on the device") for runner in _runners()),
    *((runner, "sample_tokens", "vLLM: sampling is queued") for runner in _runners()),
    (KvtierConnector, "get_num_new_matched_tokens", "scheduler: match"),
    (KvtierConnector, "build_connector_meta", "scheduler: plan"),
    (KvtierConnector, "bind_connector_metadata", "worker: begin a step"),
    (KvtierConnector, "start_load_kv", "worker: begin loads"),
    (KvtierConnector, "wait_for_save", "worker: begin saves"),
    (KvtierConnector, "get_transfer_results", "worker: results"),
    (Lookups, "_match", "thread: hash and match"),
    (WorkerTransfer, "_lease", "thread: lease"),
    (WorkerTransfer, "_bring_span", "thread: load"),
    (LoadNews, "arrive", "thread: a load is reported early"),
    (LoadNews, "end", "thread: a load is over"),
)

_noted: list[tuple[float, float, str]] = []


class TimelineConnector(KvtierConnector):
    """Writes the record when its engine shuts down."""

    def shutdown(self) -> None:
        Path(os.environ[FILE_VARIABLE]).write_text(json.dumps(sorted(_noted)))
        super().shutdown()


def _watch(owner: type, name: str, what: str) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:
        began_at = time.monotonic()
        try:
            return inner(*arguments, **named)
        finally:
            _noted.append((began_at, time.monotonic(), what))

    setattr(owner, name, call)


for _owner, _name, _what in _WATCHED:
    _watch(_owner, _name, _what)
