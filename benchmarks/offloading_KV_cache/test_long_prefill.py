"""Long prompts: computed, on the device, and in host memory.

    python -m benchmarks.offloading_KV_cache.test_long_prefill [--quick] [--json FILE] [--plot FILE.png]

10 prompts x 10240 random tokens, all submitted at once, N tokens out, over and over: with no cache, with the device's
cache alone, with host memory below it, and with host memory and the device's cache off. Requests per second of the
first round, which computes, and of the later ones; a later round of the last kind loads every prompt. Less on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Variant
from benchmarks.prefix_caching.options import is_h200, parse
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
OUTPUTS = (2, 8, 32, 128)
NONE, DEVICE = "no cache", "device cache"
HOST_ON, HOST_OFF = "host, device cache on", "host, device cache off"
WAYS = {
    NONE: Variant("naive", has_tiers=False),
    DEVICE: Variant(DEVICE_ON, has_tiers=False),
    HOST_ON: Variant(DEVICE_ON),
    HOST_OFF: Variant(DEVICE_OFF),
}
VLLM = {
    NONE: {2: 4.04, 8: 3.98, 32: 3.75, 128: 3.06},
    DEVICE: {2: 229.0, 8: 101.0, 32: 43.0, 128: 11.8},
    HOST_OFF: {2: 62.0, 8: 50.0, 32: 28.0, 128: 10.3},
}
"""vLLM 0.24.0 on an H200, Qwen2.5-7B's shape, the better figure where there are two; the last: GPU cache reset."""


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    outputs: tuple[int, ...]
    repeats: int
    max_num_requests: int
    max_num_batched_tokens: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    parser.add_argument("--outputs", type=int, nargs="+", help="values of N")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("offloading_KV_cache.test_long_prefill", settings_of(arguments, size))
    try:
        measure(arguments, size, result)
        print_figures(result.figures, {})
    finally:  # what was measured before a failure is not lost
        result.write(arguments.json)
    if arguments.plot is not None:
        _draw(arguments, size, result)


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    run_tokens = size.prompts * (size.input_tokens + max(size.outputs) + 16)
    with (
        host_tiers(2 * kv_bytes(arguments, run_tokens)) as tiers,
        open_stand(
            arguments,
            tiers,
            kv_tokens=2 * run_tokens,
            max_model_len=size.input_tokens + max(size.outputs) + 32,
            max_num_requests=size.max_num_requests,
            max_num_batched_tokens=size.max_num_batched_tokens,
        ) as stand,
    ):
        result.settings = {**result.settings, **tiers.settings, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, size.prompts, size.input_tokens)
        for num_outputs in size.outputs:
            _measure_outputs(arguments, stand, maker, size, num_outputs, result)
    print_table(f"QPS, {size.prompts} prompts x {size.input_tokens} tokens, N out", result.rows)


def _measure_outputs(
    arguments: argparse.Namespace, stand: EngineStand, maker: PromptMaker, size: Size, num_outputs: int, result: Result
) -> None:
    hits: dict[str, float] = {}
    cold: list[float] = []
    for name, variant in WAYS.items():
        prompts = maker.make(size.prompts, size.input_tokens)
        stand.use(variant)
        first = stand.run(prompts, num_outputs)
        expect_hits(first, (), 0.0, f"{name}, first round")
        stand.settle()
        cold.append(first.qps)
        row: dict[str, object] = {"N": num_outputs, "what": name, "first QPS": round(first.qps, 3)}
        if name != NONE:
            again = [stand.run(prompts, num_outputs) for _ in range(size.repeats)]
            for one in again:
                tiers = BELOW if name == HOST_OFF else ("device",)
                expect_hits(one, tiers, full_share(size.input_tokens), f"{name}, later round")
                expect_tokens(one, first, arguments.device, name)
            hits[name] = statistics.median(one.qps for one in again)
            row |= {
                "later QPS": round(hits[name], 3),
                "later / first": round(hits[name] / first.qps, 2),
                "from": shown_shares(again[-1].shares),
            }
        if is_h200(arguments.device) and num_outputs in VLLM.get(name, {}):
            row["vLLM 0.24"] = VLLM[name][num_outputs]
        console.print(", ".join(f"{key} {value}" for key, value in row.items()))
        result.rows.append(row)
    result.figures[f"host_hit_over_cold_n{num_outputs}"] = hits[HOST_OFF] / statistics.median(cold)
    result.figures[f"host_hit_over_device_hit_n{num_outputs}"] = hits[HOST_OFF] / hits[DEVICE]
    if arguments.device == "cuda":
        result.figures[f"host_hit_n{num_outputs}"] = hits[HOST_OFF]


def _draw(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    lines: dict[str, dict[float, float]] = {}
    for row in result.rows:
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
            outputs=(2, 32) if quick else OUTPUTS,
            repeats=3,
            max_num_requests=128,
            max_num_batched_tokens=8192,
        )
    else:
        size = Size(
            prompts=2 if quick else 4,
            input_tokens=1024 if quick else 2048,
            outputs=(2, 8) if quick else (2, 8, 32),
            repeats=3,
            max_num_requests=16,
            max_num_batched_tokens=512,
        )
    names = ("prompts", "input_tokens", "outputs", "repeats", "max_num_requests", "max_num_batched_tokens")
    return Size(**{**vars(size), **chosen(arguments, *names)})


if __name__ == "__main__":
    main()
