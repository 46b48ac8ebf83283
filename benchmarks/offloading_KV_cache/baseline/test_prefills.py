"""Computing a prompt beside copying its KV: how many times faster is it to load?

    python -m benchmarks.offloading_KV_cache.baseline.test_prefills [--quick] [--json FILE] [--model-shape NAME]

One prompt of 8192 tokens, 1024 a step, one token out, for the shapes of several models with plain weights, with weights
of 8 bits and with GPTQ's 4: the time to compute it; to copy its blocks once from host memory to the device and back;
and to answer it from host memory, through the whole engine, with the device's cache off. On a CPU, fewer tokens and a
small shape.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.model_configs import SMALL_SHAPE
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant
from benchmarks.prefix_caching.options import device_settings, make_parser, parse
from benchmarks.prefix_caching.test_quantized import GPTQ_FIELDS
from benchmarks.tier_stand import (
    BELOW,
    BLOCK_TOKENS,
    DEVICE_OFF,
    WALL,
    expect_hits,
    expect_tokens,
    full_share,
    host_tiers,
    kv_bytes,
    open_stand,
    warm_up,
)
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copier import Copier
from kvtier.transfer.copiers.cuda_copier import CudaCopier
from kvtier.transfer.copiers.geometry import Geometry
from kvtier.transfer.copiers.host_copier import HostCopier

FP8, GPTQ = "fp8", "GPTQ-Int4"
WEIGHTS = ("plain", FP8, GPTQ)
Model = tuple[str, str]
GPU_MODELS: tuple[Model, ...] = (
    ("Qwen2.5-32B", GPTQ),
    ("Qwen2.5-7B", "plain"),
    ("Qwen2.5-7B", FP8),
    ("Qwen2.5-3B", "plain"),
    ("glm-4-9b-chat-1m", "plain"),
    ("glm-4-9b-chat-1m", FP8),
    ("Llama-3.1-8B", "plain"),
    ("Llama-3.1-8B", FP8),
)
"""Each shape, and the format of its weights."""
QUICK_GPU_MODELS: tuple[Model, ...] = (("Qwen2.5-3B", "plain"), ("Qwen2.5-7B", "plain"))
CPU_TOKENS = {SMALL_SHAPE: 4096, "Qwen2.5-0.5B": 512}
QUICK_CPU_TOKENS = {SMALL_SHAPE: 1024}
"""A core computes this in some seconds."""

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Size:
    input_tokens: int
    max_num_batched_tokens: int
    repeats: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__ or "", "eight models")
    parser.add_argument("--input-tokens", type=int, help="how long the prompt is")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, help="of --model-shape (plain)")
    given = parser.parse_args(argv)
    arguments = parse(parser, argv)
    models = QUICK_GPU_MODELS if arguments.quick else GPU_MODELS
    if arguments.device == "cpu":
        models = tuple((shape, "plain") for shape in (QUICK_CPU_TOKENS if arguments.quick else CPU_TOKENS))
    if given.model_shape:
        models = tuple((given.model_shape, weights) for weights in given.weights or ("plain",))
    settings = {
        "models": [_name(model) for model in models],
        **device_settings(arguments.device, WALL),
        "quick": arguments.quick,
    }
    result = Result("offloading_KV_cache.baseline.test_prefills", settings)
    try:
        for model in models:
            arguments.model_shape = model[0]
            measure(arguments, _size(arguments), model, result)
        print_table("one prompt, computed, copied and loaded, medians", result.rows)
        print_figures(result.figures, {})
    finally:  # keep the results from before a failure
        result.write(arguments.json)


def _name(model: Model) -> str:
    shape, weights = model
    return shape if weights == "plain" else f"{shape}, {weights}"


def measure(arguments: argparse.Namespace, size: Size, model: Model, result: Result) -> None:
    name, weights = _name(model), model[1]
    console.print(f"{name}: {size.input_tokens} tokens")
    prefill_s: list[float] = []
    loaded_s: list[float] = []
    computed_rounds: list[Round] = []
    loaded_rounds: list[Round] = []
    length = size.input_tokens
    with (
        host_tiers(kv_bytes(arguments, 3 * length)) as tiers,
        open_stand(
            arguments,
            tiers,
            kv_tokens=2 * length,
            always_load=True,
            max_model_len=length + 32,
            max_num_requests=4,
            max_num_batched_tokens=size.max_num_batched_tokens,
            quantization="fp8" if weights == FP8 else None,
            model_fields={"quantization_config": GPTQ_FIELDS} if weights == GPTQ else {},
        ) as stand,
    ):
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, 1, length)
        for _ in range(size.repeats):
            prompts = maker.make(1, length)
            stand.use(Variant(DEVICE_OFF))
            computed = stand.run(prompts, 1)
            expect_hits(computed, (), 0.0, name)
            stand.settle()
            loaded = stand.run(prompts, 1)
            expect_hits(loaded, BELOW, full_share(length), name)
            computed_rounds.append(computed)
            loaded_rounds.append(loaded)
            prefill_s.append(computed.seconds)
            loaded_s.append(loaded.seconds)
        expect_tokens(_joined(loaded_rounds), _joined(computed_rounds), arguments.device, name)
        in_s, out_s = _copy_once(stand, length // BLOCK_TOKENS, size.repeats)
        layout = stand.llm.engine.arena.layout
    prefill, load = statistics.median(prefill_s), statistics.median(loaded_s)
    result.rows.append(
        {
            "shape": name,
            "layers": layout.layers,
            "KV heads": layout.kv_heads,
            "head": layout.head_dim,
            "KV dtype": layout.dtype,
            "tokens": length,
            "KV MiB": round(length // BLOCK_TOKENS * layout.block_bytes / 2**20, 1),
            "prefill ms": round(1000 * prefill, 2),
            "copy in ms": round(1000 * in_s, 2),
            "copy out ms": round(1000 * out_s, 2),
            "prefill / copy in": round(prefill / in_s, 1),
            "loaded ms": round(1000 * load, 2),
            "prefill / loaded": round(prefill / load, 1),
        }
    )
    result.figures[f"prefill_over_copy_{name}"] = prefill / in_s
    result.figures[f"prefill_over_loaded_{name}"] = prefill / load


def _joined(rounds: list[Round]) -> Round:
    """The answers of all prompts: a single one may be a close call."""
    return replace(rounds[0], answers=[answer for one in rounds for answer in one.answers])


def _copy_once(stand: EngineStand, num_blocks: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a copy of scattered blocks from host memory to the device, and of one back."""
    kv = stand.llm.engine.arena
    block_ids = random.Random(4).sample(range(kv.num_blocks), num_blocks)
    offsets = [slot * kv.layout.slot_bytes for slot in range(num_blocks)]
    ins: list[float] = []
    outs: list[float] = []
    with (
        contextlib.closing(MappedArena.create(num_blocks * kv.layout.slot_bytes)) as arena,
        _copier(stand, arena) as copier,
    ):
        for _ in range(repeats + 1):
            stand.synchronize()
            started_at = time.perf_counter()
            copier.store(block_ids, arena, offsets, copier.mark()).wait()
            stored_at = time.perf_counter()
            copier.load(arena, offsets, block_ids, copier.mark()).wait()
            ins.append(time.perf_counter() - stored_at)
            outs.append(stored_at - started_at)
    return statistics.median(ins[1:]), statistics.median(outs[1:])


@contextlib.contextmanager
def _copier(stand: EngineStand, arena: MappedArena) -> Iterator[Copier]:
    kv = stand.llm.engine.arena
    geometry = Geometry(kv.layers, kv.layout)
    if kv.blocks.device.type != "cuda":
        yield HostCopier(geometry)
        return
    with contextlib.closing(CudaCopier(geometry)) as copier:
        copier.adopt(arena)
        registration = copier.registration(arena)
        assert registration is not None
        assert registration.wait(_PATIENCE_S), "the memory could not be registered"
        yield copier


def _size(arguments: argparse.Namespace) -> Size:
    if arguments.device == "cuda":
        tokens, batched, repeats = 8192, 1024, 3 if arguments.quick else 7
    else:
        by_shape = QUICK_CPU_TOKENS if arguments.quick else CPU_TOKENS
        tokens, batched, repeats = by_shape.get(arguments.model_shape, 32), 512, 3
    return Size(
        arguments.input_tokens or tokens, arguments.max_num_batched_tokens or batched, arguments.repeats or repeats
    )


if __name__ == "__main__":
    main()
