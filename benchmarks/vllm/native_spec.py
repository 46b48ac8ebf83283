"""vLLM's own offloading on its CPU engine, whose built-in spec refuses to start there: the same tiers, another copier.

`OffloadingConnector` loads `HostTieringSpec` by `spec_module_path`. Pages are copied at once, by the worker's own
threads: vLLM could do nothing faster on this engine.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """One page of vLLM is one chunk of the tier."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _HostCopier(kv_caches, region)


class _HostCopier(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._finished: list[TransferResult] = []
        for one in kv_caches.tensors:
            pages = one.tensor.view(torch.int8).view(-1, one.page_size_bytes)
            self._pairs.append((pages, region.create_next_worker_view(one.page_size_bytes)))

    def submit_store(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for pages, chunks in self._pairs:
            _copy(pages, src_spec, chunks, dst_spec)
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for pages, chunks in self._pairs:
            _copy(chunks, src_spec, pages, dst_spec)
        return self._finish(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job is over when it was submitted."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()

    def _finish(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True


def _copy(source: torch.Tensor, source_spec: Any, target: torch.Tensor, target_spec: Any) -> None:
    assert isinstance(source_spec, BlockIDsLoadStoreSpec)
    assert isinstance(target_spec, BlockIDsLoadStoreSpec)
    for source_row, target_row in zip(source_spec.block_ids.tolist(), target_spec.block_ids.tolist(), strict=True):
        target[target_row].copy_(source[source_row])
