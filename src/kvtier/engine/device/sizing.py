"""How many KV blocks the device has room for.

`gpu_memory_utilization` is this engine's own share: device memory used by other processes, or by other engines of this
one, does not count against it. Two engines with 0.45 can share a device, even if they start at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.engine.config import EngineConfig
from kvtier.engine.device.kv_arena import KvArena
from kvtier.engine.device.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.errors import ConfigError
from kvtier.models.loading import LoadedModel
from kvtier.sizes import format_size

_DEFAULT_HOST_BYTES = 1 << 30
_MIN_BLOCKS = 2
_PEAK_SLACK = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device before KV is put on it. `own_bytes` are this engine's so far; a step takes `step_bytes` more."""

    total_bytes: int
    free_bytes: int
    own_bytes: int
    step_bytes: int

    def limits(self, share: float) -> dict[str, int]:
        """Bytes for KV, each under the name of the limit that allows no more. Below zero if there is no room at all."""
        return {
            "gpu_memory_utilization": int(self.total_bytes * share) - self.own_bytes - self.step_bytes,
            "the free memory of the device": self.free_bytes - self.step_bytes,
        }


def allocated_bytes(device: torch.device) -> int:
    """What this process has on a GPU; read it before an engine puts anything there."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def choose_num_blocks(
    config: EngineConfig, loaded: LoadedModel, layout: KvLayout, device: torch.device, allocated_before_bytes: int
) -> int:
    """As many as `kv_cache_space` and, on a GPU, `gpu_memory_utilization` allow after room for the largest step.

    `allocated_before_bytes` is the result of `allocated_bytes` before the model was loaded. Raises `ConfigError` if too
    few blocks fit to serve anything.
    """
    limits = {} if config.kv_cache_space is None else {"kv_cache_space": config.kv_cache_space}
    if device.type == "cuda":
        memory = _measure(config, loaded, layout, device, allocated_before_bytes)
        limits |= memory.limits(config.gpu_memory_utilization)
    return fit_blocks(limits or {"kv_cache_space": _DEFAULT_HOST_BYTES}, layout.block_bytes)


def fit_blocks(limits: Mapping[str, int], block_bytes: int) -> int:
    """As many as the tightest of `limits` allows. Raises `ConfigError`, with its name, if that is too few."""
    name = min(limits, key=lambda one: limits[one])
    num_blocks = limits[name] // block_bytes
    if num_blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"{name} leaves {format_size(max(0, limits[name]))} for KV, "
            f"but {_MIN_BLOCKS} blocks take {format_size(_MIN_BLOCKS * block_bytes)}"
        )
    return num_blocks


def _measure(
    config: EngineConfig, loaded: LoadedModel, layout: KvLayout, device: torch.device, allocated_before_bytes: int
) -> DeviceMemory:
    """Run a step of the largest size, to measure what it takes."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step, num_blocks = _largest_step(config, loaded, layout.block_tokens)
    arena = KvArena(num_blocks, layout, device)
    runner = Runner(
        loaded.model, arena, max_num_requests=len(step.rows), max_model_len=num_blocks * layout.block_tokens
    )
    runner.submit(step).wait()
    peak = torch.cuda.max_memory_allocated(device) - before - arena.nbytes
    del runner, arena
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        total_bytes=total,
        free_bytes=free,
        own_bytes=before - allocated_before_bytes,
        step_bytes=int(peak * _PEAK_SLACK),
    )


def _largest_step(config: EngineConfig, loaded: LoadedModel, block_tokens: int) -> tuple[Step, int]:
    """The most rows and tokens that a step can have, all with the costliest sampling; and how many blocks it takes."""
    num_rows = min(config.max_num_requests, config.max_num_batched_tokens)
    max_tokens = config.max_model_len or loaded.config.max_position_embeddings
    count = min(config.max_num_batched_tokens // num_rows, max_tokens)
    row_blocks = -(-count // block_tokens)
    params = SamplingParams(temperature=1.0, top_p=0.5)
    step = Step()
    for slot in range(num_rows):
        request = Request(f"probe-{slot}", [0] * count, params, max_tokens=1)
        request.blocks.ids = list(range(slot * row_blocks, (slot + 1) * row_blocks))
        request.num_in_flight = 1
        request.slot = slot
        step.rows.append(StepRow(request, 0, count, True))
    step.num_tokens = num_rows * count
    return step, num_rows * row_blocks
