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
    num_tokens = min(config.max_num_batched_tokens, config.max_model_len or loaded.config.max_position_embeddings)
    num_blocks = -(-num_tokens // layout.block_tokens)
    arena = KvArena(num_blocks, layout, device)
    runner = Runner(loaded.model, arena, max_num_requests=1, max_model_len=num_blocks * layout.block_tokens)
    request = Request("probe", [0] * num_tokens, SamplingParams(temperature=1.0), max_tokens=1)
    request.blocks.ids = list(range(num_blocks))
    request.num_in_flight = 1
    runner.submit(Step([StepRow(request, 0, num_tokens, True)], [], num_tokens)).wait()
    peak = torch.cuda.max_memory_allocated(device) - before - arena.nbytes
    runner.forget(request)
    del runner, arena
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    left: int = int(total * config.gpu_memory_utilization) - used - int(peak * 1.1)
    return left
