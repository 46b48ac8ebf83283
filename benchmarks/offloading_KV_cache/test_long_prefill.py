"""Long prompts: computed, on the device, and in host memory.

    python -m benchmarks.offloading_KV_cache.test_long_prefill [--quick] [--json FILE] [--plot FILE.png]

10 prompts x 10240 random tokens, all submitted at once, 1024 tokens a step, N tokens out, three rounds: with no cache,
with the device's cache alone, with host memory below it, and with host memory and the device's cache off. Requests per
second of the first round, which computes, and of the later ones; a later round of the last kind loads every prompt.

One prompt of 30,000 tokens in host memory, one output token: the time that `generate` takes. Less on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, console, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Variant
from benchmarks.prefix_caching.options import conclude, is_h200, parse
from benchmarks.tier_stand import (
    BELOW,
    DEVICE_OFF,
    DEVICE_ON,
    chosen,
    expect_hits,
    expect_tokens,
    full_share,
    host_tiers,
    kv_bytes,
    make_tier_parser,
    open_stand,
    settings_of,
    shown_shares,
    warm_up,
)

GPU_SHAPE = "Qwen2.5-7B"
OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
NONE, DEVICE = "no cache", "device cache"
HOST_ON, HOST_OFF = "host, device cache on", "host, device cache off"
WAYS = {
    NONE: Variant("naive", has_tiers=False),
    DEVICE: Variant(DEVICE_ON, has_tiers=False),
    HOST_ON: Variant(DEVICE_ON),
    HOST_OFF: Variant(DEVICE_OFF),
}
QUICK_WAYS = (NONE, DEVICE, HOST_OFF)
VLLM = {
    NONE: {2: 4.04, 8: 3.98, 32: 3.75, 128: 3.06},
    DEVICE: {2: 229.0, 8: 101.0, 32: 43.0, 128: 11.8},
    HOST_OFF: {2: 62.0, 8: 50.0, 32: 28.0, 128: 10.3},
}
"""vLLM 0.24.0 on an H200, Qwen2.5-7B's shape, the better of two figures. For the last one, its GPU cache was reset."""
VLLM_HOST_TTFT_MS = 51.0

HOST_HIT_BARS = {2: ">= 78", 8: ">= 62", 32: ">= 35"}
TTFT_BARS = {"host_ttft_30k_ms": "<= 38"}


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    outputs: tuple[int, ...]
    repeats: int
    ways: tuple[str, ...]
    ttft_tokens: int
    max_num_requests: int
    max_num_batched_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    parser.add_argument("--outputs", type=int, nargs="+", help="values of N")
    parser.add_argument("--ttft-tokens", type=int, help="how long the prompt is whose first token is timed; 0: none")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("offloading_KV_cache.test_long_prefill", settings_of(arguments, size))
    status = conclude(result, arguments, _bars(arguments, size), lambda: measure(arguments, size, result))
    if arguments.plot is not None:
        _draw(arguments, size, result)
    return status


def _bars(arguments: argparse.Namespace, size: Size) -> dict[str, str]:
    if not is_h200(arguments.device):
        return {}
    bars = {f"host_hit_n{count}": bar for count, bar in HOST_HIT_BARS.items() if count in size.outputs}
    return bars | TTFT_BARS if size.ttft_tokens else bars


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    run_tokens = max(size.prompts * (size.input_tokens + max(size.outputs) + 16), size.ttft_tokens + 32)
    with (
        host_tiers(2 * kv_bytes(arguments, run_tokens)) as tiers,
        open_stand(
            arguments,
            tiers,
            kv_tokens=2 * run_tokens,
            max_model_len=max(size.input_tokens + max(size.outputs), size.ttft_tokens) + 32,
            max_num_requests=size.max_num_requests,
            max_num_batched_tokens=size.max_num_batched_tokens,
        ) as stand,
    ):
        result.settings = {**result.settings, **tiers.settings, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, size.prompts, size.input_tokens)
        for num_outputs in size.outputs:
            _measure_outputs(arguments, stand, maker, size, num_outputs, result)
        shown = [{name: value for name, value in row.items() if name != "rounds"} for row in result.rows]
        print_table(f"QPS, {size.prompts} prompts x {size.input_tokens} tokens, N out", shown)
        if size.ttft_tokens:
            _measure_first_token(arguments, stand, maker, size, result)


def _measure_first_token(
    arguments: argparse.Namespace, stand: EngineStand, maker: PromptMaker, size: Size, result: Result
) -> None:
    """One long prompt alone: computed, then from host memory over and over."""
    prompts = maker.make(1, size.ttft_tokens)
    stand.use(WAYS[HOST_OFF])
    first = stand.run(prompts, 1)
    expect_hits(first, (), 0.0, "the longest prompt, first round")
    stand.settle()
    again = [stand.run(prompts, 1) for _ in range(2 + 2 * size.repeats)][2:]
    for one in again:
        expect_hits(one, BELOW, full_share(size.ttft_tokens), "the longest prompt, later round")
        expect_tokens(one, first, arguments.device, "the longest prompt")
    times = [1000 * one.seconds for one in again]
    row: dict[str, object] = {
        "what": "first token, host memory",
        "tokens": size.ttft_tokens,
        "computed ms": round(1000 * first.seconds, 2),
        "ms": round(statistics.median(times), 2),
        "least": round(min(times), 2),
        "from": shown_shares(again[-1].shares),
    }
    if is_h200(arguments.device):
        row["vLLM 0.24 ms"] = VLLM_HOST_TTFT_MS
    print_table(f"time to first token, one prompt of {size.ttft_tokens} tokens", [row])
    result.rows.append(row)
    result.figures["host_ttft_cold_over_hit"] = first.seconds * 1000 / statistics.median(times)
    if arguments.device == "cuda":
        result.figures["host_ttft_30k_ms"] = statistics.median(times)


def _measure_outputs(
    arguments: argparse.Namespace, stand: EngineStand, maker: PromptMaker, size: Size, num_outputs: int, result: Result
) -> None:
    hits: dict[str, float] = {}
    cold: list[float] = []
    for name in size.ways:
        variant = WAYS[name]
        prompts = maker.make(size.prompts, size.input_tokens)
        stand.use(variant)
        first = stand.run(prompts, num_outputs)
        expect_hits(first, (), 0.0, f"{name}, first round")
        stand.settle()
        cold.append(first.qps)
        row: dict[str, object] = {"N": num_outputs, "what": name, "first QPS": round(first.qps, 3)}
        rounds = [first.qps]
        if name != NONE:
            again = [stand.run(prompts, num_outputs) for _ in range(size.repeats)]
            for one in again:
                tiers = BELOW if name == HOST_OFF else ("device",)
                expect_hits(one, tiers, full_share(size.input_tokens), f"{name}, later round")
                expect_tokens(one, first, arguments.device, name)
            hits[name] = statistics.median(one.qps for one in again)
            rounds += [one.qps for one in again]
            row |= {
                "later QPS": round(hits[name], 3),
                "later / first": round(hits[name] / first.qps, 2),
                "from": shown_shares(again[-1].shares),
            }
        if is_h200(arguments.device) and num_outputs in VLLM.get(name, {}):
            row["vLLM 0.24"] = VLLM[name][num_outputs]
        console.print(", ".join(f"{key} {value}" for key, value in row.items()))
        result.rows.append({**row, "rounds": [round(one, 3) for one in rounds]})
    result.figures[f"host_hit_over_cold_n{num_outputs}"] = hits[HOST_OFF] / statistics.median(cold)
    result.figures[f"host_hit_over_device_hit_n{num_outputs}"] = hits[HOST_OFF] / hits[DEVICE]
    if arguments.device == "cuda":
        result.figures[f"host_hit_n{num_outputs}"] = hits[HOST_OFF]


def _draw(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    lines: dict[str, dict[float, float]] = {}
    for row in result.rows:
        if "N" not in row:
            continue
        for column in ("first QPS", "later QPS"):
            if column in row:
                name = f"{row['what']}, {column.removesuffix(' QPS')} round"
                lines.setdefault(name, {})[float(str(row["N"]))] = float(str(row[column]))
    draw_lines(
        lines,
        arguments.plot,
        title=f"{arguments.model_shape} on {result.settings['device']}: {size.prompts} prompts x {size.input_tokens}",
        x_label="tokens out",
        y_label="requests per second",
        has_log_x=True,
        style_of=lambda name: {"linestyle": "--" if "first" in name else "-"},
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=10,
            input_tokens=10240,
            outputs=(2, 8, 32) if quick else OUTPUTS,
            repeats=5 if quick else 2,
            ways=QUICK_WAYS if quick else tuple(WAYS),
            ttft_tokens=30000,
            max_num_requests=128,
            max_num_batched_tokens=1024,
        )
    else:
        size = Size(
            prompts=2 if quick else 4,
            input_tokens=1024 if quick else 2048,
            outputs=(2, 8) if quick else (2, 8, 32),
            repeats=3,
            ways=tuple(WAYS),
            ttft_tokens=1500 if quick else 4000,
            max_num_requests=16,
            max_num_batched_tokens=512,
        )
    names = ("prompts", "input_tokens", "outputs", "repeats", "ttft_tokens", "max_num_requests")
    return Size(**{**vars(size), **chosen(arguments, *names, "max_num_batched_tokens")})


if __name__ == "__main__":
    sys.exit(main())
