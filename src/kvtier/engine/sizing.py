"""How many KV blocks the device has room for."""

from __future__ import annotations

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.engine.config import EngineConfig
from kvtier.engine.kv_arena import KvArena
from kvtier.engine.request import Request
from kvtier.engine.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.step import Step, StepRow
from kvtier.errors import ConfigError
from kvtier.models.loading import LoadedModel
from kvtier.sizes import format_size

_DEFAULT_HOST_BYTES = 1 << 30
_MIN_BLOCKS = 2
_PEAK_SLACK = 1.1


def choose_num_blocks(config: EngineConfig, loaded: LoadedModel, layout: KvLayout, device: torch.device) -> int:
    """As many as `kv_cache_space` and, on a GPU, `gpu_memory_utilization` allow once the largest step has its room.

    Raises `ConfigError` when that is too few to serve anything.
    """
    limits = {"kv_cache_space": config.kv_cache_space}
    if device.type == "cuda":
        limits["gpu_memory_utilization"] = _free_bytes(config, loaded, layout, device)
    elif config.kv_cache_space is None:
        limits["kv_cache_space"] = _DEFAULT_HOST_BYTES
    known = {name: nbytes for name, nbytes in limits.items() if nbytes is not None}
    name = min(known, key=lambda one: known[one])
    num_blocks = known[name] // layout.block_bytes
    if num_blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"{name} leaves {format_size(max(0, known[name]))} for KV, "
            f"but {_MIN_BLOCKS} blocks take {format_size(_MIN_BLOCKS * layout.block_bytes)}"
        )
    return num_blocks


def _free_bytes(config: EngineConfig, loaded: LoadedModel, layout: KvLayout, device: torch.device) -> int:
    """What is left of the share after the weights and the activations of a step of the largest size."""
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
    left: int = int(total * config.gpu_memory_utilization) - (total - free) - int(peak * _PEAK_SLACK)
    return left


def _largest_step(config: EngineConfig, loaded: LoadedModel, block_tokens: int) -> tuple[Step, int]:
    """As many rows and tokens as a step can have, every row with the dearest sampling; and how many blocks it takes."""
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
