"""Long prompts, cold and repeated: the worth of the device's prefix cache, and how near decoding is to its limit.

    python -m benchmarks.prefix_caching.test_long_prefill [--quick] [--json FILE]

10 prompts x 10240 random tokens, all submitted at once, 1024 tokens a step, N tokens out, three rounds: `cold` computes
them, `hit` repeats the same prompts with their KV on the device. Requests per second; the last block of a prompt is
computed again, except by yoco.

One prompt of 30,000 tokens and one output token: the time that `generate` takes.

Decoding: the median time per output token of a batch whose prompts are all cached, against the time that reading the
weights and the KV once takes at the bandwidth of a large copy in the same run; also of one long prompt among short
ones. On an H200, for the ten long prompts, against the same at the 4.8 TB/s of its data sheet, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Result, console, print_table
from benchmarks.prefix_caching.engine_stand import (
    MANAGERS,
    EngineStand,
    PromptMaker,
    Variant,
    clock_of,
    kv_bytes_of,
)
from benchmarks.prefix_caching.options import conclude, device_settings, is_h200, make_parser, parse
from benchmarks.prefix_caching.transformers_peer import PeerRound, measure_peer
from kvtier.engine.schedule.block_manager import BlockManagerName

OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
QUICK_OUTPUTS = (2, 8, 32, 128)
PARTS = ("long", "first-token", "decode")
VLLM_COLD = {2: 4.04, 8: 3.98, 32: 3.75, 128: 3.06}
VLLM_HIT = {2: 229.0, 8: 101.0, 32: 43.0, 128: 11.8}
VLLM_TTFT_MS = {"cold": 900.0, "hit": 15.5}
"""vLLM 0.24.0 on an H200, Qwen2.5-7B's shape, the better of two figures."""

H200_BYTES_PER_S = 4.8e12
"""By its data sheet; a large copy reaches about 4.2e12."""

H200_BARS = {
    "long": {
        **{f"cold_n{num_outputs}": f">= {0.95 * qps:.4g}" for num_outputs, qps in VLLM_COLD.items()},
        **{f"gpu_hit_n{num_outputs}": f">= {qps}" for num_outputs, qps in VLLM_HIT.items()},
    },
    "first-token": {"ttft_30k_gpu_hit_ms": "<= 12"},
    "decode": {"decode_long_over_h200_limit": "<= 1.3"},
}
"""The bars of each part. Cold prompts are compared with vLLM's in steps as long as its own."""

_VLLM_STEP_TOKENS = 8192

DEFAULT: BlockManagerName = "prefix_caching"


@dataclass(frozen=True)
class Size:
    """How much is measured. `ttft_tokens` is the one long prompt; `decodes` are batches of contexts."""

    prompts: int
    input_tokens: int
    outputs: tuple[int, ...]
    repeats: int
    hit_repeats: int
    managers: tuple[BlockManagerName, ...]
    ttft_tokens: int
    decodes: tuple[tuple[tuple[int, int], ...], ...]
    decode_outputs: int
    max_num_requests: int
    max_num_batched_tokens: int
    copy_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--managers", nargs="+", choices=MANAGERS, help="block managers to measure")
    parser.add_argument("--outputs", type=int, nargs="+", help="values of N")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--peer", action="store_true", help="transformers' continuous batching too, with N = 2")
    parser.add_argument("--peer-timeout", type=float, default=90.0, help="seconds for transformers")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("prefix_caching.test_long_prefill", _settings(arguments, size))
    return conclude(result, arguments, _bars(arguments, size), lambda: measure(arguments, size, result))


def _bars(arguments: argparse.Namespace, size: Size) -> dict[str, str]:
    """The bars of the parts that are measured."""
    bars: dict[str, str] = {}
    if is_h200(arguments.device) and DEFAULT in size.managers:
        for part in arguments.parts:
            bars |= H200_BARS[part]
    absent = {f"{kind}_n{count}" for kind in ("cold", "gpu_hit") for count in VLLM_COLD if count not in size.outputs}
    if size.max_num_batched_tokens < _VLLM_STEP_TOKENS:
        absent |= {f"cold_n{count}" for count in VLLM_COLD}
    return {name: bar for name, bar in bars.items() if name not in absent}


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    with_vllm = is_h200(arguments.device)
    started_at = time.perf_counter()
    console.print(f"loading {arguments.model_shape} on {arguments.device}")
    with _open(arguments, size) as stand:
        result.settings = {**result.settings, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, size)
        console.print(f"ready after {time.perf_counter() - started_at:.0f} s")
        if "long" in arguments.parts:
            measure_long_prompts(stand, maker, size, result, with_vllm=with_vllm)
        if "first-token" in arguments.parts:
            measure_first_token(stand, maker, size, result, with_vllm=with_vllm)
        if "decode" in arguments.parts:
            measure_decode(stand, maker, size, result, arguments.device)
    if arguments.peer:
        measure_transformers(arguments, maker, size, result)
    if arguments.device == "cpu":  # sizes and speeds of their own: only ratios of one clock may be compared
        ratios = ("hit_over_cold", "ttft_cold_over_hit", "over_transformers")
        result.figures = {name: value for name, value in result.figures.items() if name.startswith(ratios)}


def warm_up(stand: EngineStand, maker: PromptMaker, size: Size) -> None:
    """Warm up, untimed: cold and hit, long prompts and a single one. Kernels are compiled, memory is touched."""
    stand.use(Variant("yoco"))
    prompts = maker.make(size.prompts, size.input_tokens)
    for count in (1, 1, size.prompts, size.prompts):
        stand.run(prompts[:count], 4)


def measure_long_prompts(
    stand: EngineStand, maker: PromptMaker, size: Size, result: Result, *, with_vllm: bool
) -> None:
    rows: list[dict[str, object]] = []
    for manager in size.managers:
        reuses = manager in ("prefix_caching", "yoco")
        for num_outputs in size.outputs:
            cold: list[float] = []
            hit: list[float] = []
            for _ in range(size.repeats):
                prompts = maker.make(size.prompts, size.input_tokens)
                stand.use(Variant(manager))
                first = stand.run(prompts, num_outputs)
                cold.append(first.qps)
                for _ in range(size.hit_repeats if reuses else 0):
                    again = stand.run(prompts, num_outputs)
                    if again.cached_share < 0.95:
                        console.print(f"[yellow]only {again.cached_share:.3f} of the tokens were cached")
                    hit.append(again.qps)
            row: dict[str, object] = {"manager": manager, "N": num_outputs}
            row["cold QPS"] = round(statistics.median(cold), 3)
            if with_vllm and num_outputs in VLLM_COLD:
                row["vLLM cold"] = VLLM_COLD[num_outputs]
            if hit:
                row["hit QPS"] = round(statistics.median(hit), 3)
                row["hit / cold"] = round(statistics.median(hit) / statistics.median(cold), 1)
                if with_vllm and num_outputs in VLLM_HIT:
                    row["vLLM hit"] = VLLM_HIT[num_outputs]
            if manager == DEFAULT:
                result.figures[f"cold_n{num_outputs}"] = statistics.median(cold)
                result.figures[f"gpu_hit_n{num_outputs}"] = statistics.median(hit)
                result.figures[f"hit_over_cold_n{num_outputs}"] = statistics.median(hit) / statistics.median(cold)
            console.print("long prompts: " + ", ".join(f"{name} {value}" for name, value in row.items()))
            rows.append(row)
            rounds = [round(qps, 4) for qps in (*cold, *hit)]
            result.rows.append({"part": "long prompts", **row, "rounds": rounds})
    print_table(f"{size.prompts} prompts x {size.input_tokens} tokens, N out, requests per second", rows)


def measure_first_token(stand: EngineStand, maker: PromptMaker, size: Size, result: Result, *, with_vllm: bool) -> None:
    cold: list[float] = []
    hit: list[float] = []
    engine_hit: list[float] = []
    stand.use(Variant(DEFAULT))
    for _ in range(3):
        prompts = maker.make(1, size.ttft_tokens)
        cold.append(1000 * stand.run(prompts, 1).seconds)
        for _ in range(5):
            again = stand.run(prompts, 1)
            hit.append(1000 * again.seconds)
            engine_hit.append(1000 * again.answers[0].ttft_s)
    rows: list[dict[str, object]] = []
    for name, times in (("cold", cold), ("hit", hit), ("hit, from the request's arrival in the engine", engine_hit)):
        row: dict[str, object] = {"what": name, "ms": round(statistics.median(times), 2), "least": round(min(times), 2)}
        if with_vllm and name in VLLM_TTFT_MS:
            row["vLLM ms"] = VLLM_TTFT_MS[name]
        rows.append(row)
    print_table(f"time to first token, one prompt of {size.ttft_tokens} tokens", rows)
    result.rows += [{"part": "first token", "tokens": size.ttft_tokens, **row} for row in rows]
    result.figures["ttft_30k_gpu_hit_ms"] = statistics.median(hit)
    result.figures["ttft_30k_cold_ms"] = statistics.median(cold)
    result.figures["ttft_cold_over_hit"] = statistics.median(cold) / statistics.median(hit)


def measure_decode(stand: EngineStand, maker: PromptMaker, size: Size, result: Result, device: str) -> None:
    engine = stand.llm.engine
    config, layout = engine.loaded.config, engine.arena.layout
    bandwidth = measure_bandwidth(device, size.copy_bytes)
    weights_bytes = engine.loaded.weights_bytes
    if not config.tie_word_embeddings:  # a row of the table for each token, not the table
        weights_bytes -= config.vocab_size * config.hidden_size * layout.itemsize
    token_bytes = layout.block_bytes / layout.block_tokens
    rows = []
    for batches in size.decodes:
        prompts = [prompt for batch, context in batches for prompt in maker.make(batch, context)]
        stand.use(Variant(DEFAULT))
        stand.run(prompts, 2)
        done = [stand.run(prompts, size.decode_outputs) for _ in range(3)]
        step_s = statistics.median(
            statistics.median(answer.time_per_output_token_s for answer in one.answers) for one in done
        )
        kv_bytes = (sum(map(len, prompts)) + len(prompts) * size.decode_outputs / 2) * token_bytes
        limit_s = (weights_bytes + kv_bytes) / bandwidth
        rows.append(
            {
                "batch": " + ".join(str(batch) for batch, _ in batches),
                "context": " + ".join(str(context) for _, context in batches),
                "step ms": round(1000 * step_s, 3),
                "limit ms": round(1000 * limit_s, 3),
                "KV share of bytes": round(kv_bytes / (weights_bytes + kv_bytes), 3),
                "of limit": round(limit_s / step_s, 3),
                "schedule ms a step": round(statistics.median(one.schedule_ms for one in done), 3),
            }
        )
        ratio = limit_s / step_s
        name = "decode_of_limit" if len(batches) == 1 else "decode_mixed_of_limit"
        result.figures[name] = min(ratio, result.figures.get(name, ratio))
        if is_h200(device) and batches == ((size.prompts, size.input_tokens),):
            result.figures["decode_long_over_h200_limit"] = step_s / ((weights_bytes + kv_bytes) / H200_BYTES_PER_S)
        console.print(f"decode, batch {rows[-1]['batch']} of {rows[-1]['context']}: {1000 * step_s:.2f} ms a step")
    print_table(f"decoding beside the limit at {bandwidth / 1e9:.0f} GB/s", rows)
    result.rows += [{"part": "decode", "GB/s": round(bandwidth / 1e9, 1), **row} for row in rows]


def measure_bandwidth(device: str, nbytes: int) -> float:
    """Bytes read and written a second by a copy of `nbytes` on the device."""
    clock = clock_of(device)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        started_at = clock()
        for _ in range(4):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((clock() - started_at) / 4)
    return 2 * nbytes / statistics.median(times[2:])


def measure_transformers(arguments: argparse.Namespace, maker: PromptMaker, size: Size, result: Result) -> None:
    prompts = maker.make(size.prompts, size.input_tokens)
    peer = measure_peer(
        arguments.model_shape,
        arguments.device,
        [PeerRound("cold_n2", maker.make(size.prompts, size.input_tokens), prompts, 2)],
        max_batch_tokens=size.max_num_batched_tokens,
        timeout_s=arguments.peer_timeout,
    )
    row: dict[str, object] = {"what": "cold, N = 2", "QPS": round(result.figures["cold_n2"], 3)}
    if peer.qps:
        over = result.figures["cold_n2"] / peer.qps["cold_n2"]
        row |= {"transformers QPS": round(peer.qps["cold_n2"], 3), "over": round(over, 2), **peer.details}
        result.figures["over_transformers_cold_n2"] = over
    else:
        row["absent"] = peer.absent or "no result"
    print_table("transformers' generate_batch", [row])
    result.rows.append({"part": "peer", **row})


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=10,
            input_tokens=10240,
            outputs=QUICK_OUTPUTS if quick else OUTPUTS,
            repeats=1,
            hit_repeats=5 if quick else 2,
            managers=(DEFAULT,) if quick else MANAGERS,
            ttft_tokens=30000,
            decodes=(
                ((1, 1024),),
                ((8, 1024),),
                ((32, 1024),),
                ((64, 1024),),
                ((10, 10240),),
                ((16, 1024), (1, 30000)),
            ),
            decode_outputs=128,
            max_num_requests=128,
            max_num_batched_tokens=1024,
            copy_bytes=2 << 30,
        )
    else:
        size = Size(
            prompts=2 if quick else 4,
            input_tokens=512 if quick else 2048,
            outputs=QUICK_OUTPUTS if quick else OUTPUTS,
            repeats=1,
            hit_repeats=2,
            managers=(DEFAULT,) if quick else MANAGERS,
            ttft_tokens=1500 if quick else 4000,
            decodes=(((1, 256),), ((8, 256),), ((4, 128), (1, 1024))),
            decode_outputs=32,
            max_num_requests=16,
            max_num_batched_tokens=1024,
            copy_bytes=256 << 20,
        )
    chosen = {
        "prompts": arguments.prompts,
        "repeats": arguments.repeats,
        "managers": tuple(arguments.managers) if arguments.managers else None,
        "outputs": tuple(arguments.outputs) if arguments.outputs else None,
        "max_num_requests": arguments.max_num_requests,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
    }
    return Size(**{**vars(size), **{name: value for name, value in chosen.items() if value is not None}})


def _settings(arguments: argparse.Namespace, size: Size) -> dict[str, object]:
    return {
        "shape": arguments.model_shape,
        **device_settings(arguments.device),
        **vars(size),
        "parts": list(arguments.parts),
        "schedule": "async-2",
        "quick": arguments.quick,
    }


def _open(arguments: argparse.Namespace, size: Size) -> EngineStand:
    longest = max(size.input_tokens, size.ttft_tokens) + max(size.outputs)
    longest = max(longest, max(context for batches in size.decodes for _, context in batches) + size.decode_outputs)
    needed = max(size.prompts * (size.input_tokens + max(size.outputs) + 16), 4 * longest)
    space = kv_bytes_of(arguments.model_shape, 2 * needed, itemsize=4) if arguments.device == "cpu" else None
    return EngineStand(
        arguments.model_shape,
        arguments.device,
        max_model_len=longest + 16,
        max_num_requests=size.max_num_requests,
        max_num_batched_tokens=size.max_num_batched_tokens,
        kv_cache_space=space,
    )


if __name__ == "__main__":
    sys.exit(main())
