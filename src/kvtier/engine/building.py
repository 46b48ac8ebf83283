"""Builds the parts of an engine from its settings: the model on its device, its KV memory, and the tiers below."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.engine.config import EngineConfig
from kvtier.engine.device.chunk_graphs import MAX_GRAPH_TOKENS
from kvtier.engine.device.decode_graphs import MAX_GRAPH_ROWS
from kvtier.engine.device.kv_arena import KvArena
from kvtier.engine.device.prefill_probe import measure_prefill
from kvtier.engine.device.runner import Runner
from kvtier.engine.device.sizing import allocated_bytes, choose_num_blocks
from kvtier.engine.device.step_timer import NoStepTimer, StepTimer
from kvtier.engine.device.warm_up import compile_kernels
from kvtier.engine.schedule.block_manager import make_block_manager
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.engine.tier_building import has_tiers, make_hierarchy
from kvtier.errors import ConfigError
from kvtier.latency_guard import LatencyGuard
from kvtier.models.config import read_config
from kvtier.models.hub import find_model_folder
from kvtier.models.loading import LoadedModel, LoadProgress, load_model
from kvtier.models.tokenizer import Tokenizer
from kvtier.sizes import format_size
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.copiers.cuda_copier import CudaCopier
from kvtier.transfer.copiers.geometry import Geometry
from kvtier.transfer.copiers.host_copier import HostCopier
from kvtier.transfer.traffic import Traffic
from kvtier.transfer.transfer import NoTransfer, Transfer


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The fixed parts of an engine."""

    loaded: LoadedModel
    tokenizer: Tokenizer | None
    max_model_len: int
    eos_token_ids: frozenset[int]
    arena: KvArena
    namespace_fields: NamespaceFields
    namespace: Namespace


def make_current(device: torch.device) -> None:
    """Make `device` current in the calling thread: kernels and events use the current GPU, not their tensors'."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def make_parts(config: EngineConfig, progress: LoadProgress) -> EngineParts:
    """Load the model and take the device's memory. Raises `ConfigError` if that is impossible."""
    device = _device_of(config.device)
    make_current(device)
    if config.quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError("quantization fp8 needs a GPU of compute capability 8.9 or more")
    allocated_before_bytes = allocated_bytes(device)
    is_dummy = config.load_format == "dummy"
    folder = find_model_folder(
        config.model, revision=config.revision, cache_dir=config.cache_dir, has_weights=not is_dummy
    )
    read_config(folder)  # reports errors in the folder better than a tokenizer, which reads it too
    tokenizer = Tokenizer(folder, trust_remote_code=config.trust_remote_code)  # before the weights, which take long
    loaded = load_model(
        folder,
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        quantization=config.quantization,
        trust_remote_code=config.trust_remote_code,
        max_model_len=config.max_model_len,
        identity=config.identity,
        progress=progress,
    )
    model_config = loaded.config
    layout = model_config.kv_layout(config.block_size, loaded.dtype)
    num_blocks = choose_num_blocks(config, loaded, layout, device, allocated_before_bytes)
    # One block stays spare: yoco copies from it while its request has all others.
    capacity = (num_blocks - 1) * config.block_size
    try:
        arena = KvArena(num_blocks, layout, device)
    except RuntimeError as error:
        nbytes = format_size(num_blocks * layout.block_bytes)
        raise ConfigError(f"the device {device} has no room for {nbytes} of KV: set kv_cache_space") from error
    namespace_fields = loaded.namespace_fields(layout, salt=config.salt)
    return EngineParts(
        loaded,
        tokenizer,
        min(config.max_model_len or model_config.max_position_embeddings, capacity),
        frozenset(model_config.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
        arena,
        namespace_fields,
        namespace_fields.digest(),
    )


def make_runner(config: EngineConfig, parts: EngineParts) -> Runner:
    """A runner; on a GPU, every kernel of a greedy step is compiled."""
    is_cuda = parts.arena.device.type == "cuda"
    runner = Runner(
        parts.loaded.model,
        parts.arena,
        max_num_requests=config.max_num_requests,
        max_model_len=parts.max_model_len,
        eos_token_ids=sorted(parts.eos_token_ids),
        max_graph_rows=min(config.max_num_requests, MAX_GRAPH_ROWS) if config.cuda_graphs and is_cuda else 0,
        max_graph_tokens=min(config.max_num_batched_tokens, MAX_GRAPH_TOKENS),
        has_arrivals=has_tiers(config),
    )
    if is_cuda:
        compile_kernels(runner, config, parts.max_model_len)
    return runner


def make_transfer(
    config: EngineConfig, parts: EngineParts, runner: Runner, name: str, guard: LatencyGuard
) -> tuple[Transfer | NoTransfer, StepTimer | NoStepTimer]:
    """The traffic between the device and the tiers of `config`, and the timer of steps for its decisions."""
    arena = parts.arena
    layout, device = arena.layout, arena.device
    hierarchy = make_hierarchy(config, layout, parts.namespace_fields, name, device_bytes=arena.nbytes)
    if hierarchy is None:
        return NoTransfer(), NoStepTimer()
    speeds = Speeds()
    timer = StepTimer(speeds, device)
    if not config.always_load:
        measure_prefill(runner, timer, config, parts.max_model_len)
    geometry = Geometry(arena.layers, layout)
    traffic = Traffic(
        hierarchy,
        CudaCopier(geometry, let_pass=guard.let_pass) if device.type == "cuda" else HostCopier(geometry),
        speeds,
        layout=layout,
        chunk_tokens=config.max_num_batched_tokens,
        always_loads=config.always_load,
        let_pass=guard.let_pass,
    )
    return Transfer(traffic, arena.num_blocks), timer


def make_scheduler(config: EngineConfig, parts: EngineParts, transfer: Transfer | NoTransfer) -> Scheduler:
    blocks = make_block_manager(config.block_manager, parts.arena.num_blocks, config.block_size, parts.namespace)
    return Scheduler(
        blocks,
        max_num_requests=config.max_num_requests,
        max_num_batched_tokens=config.max_num_batched_tokens,
        transfer=transfer,
    )


def _device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no device {name}: torch finds {torch.cuda.device_count()} GPUs")
    return device
