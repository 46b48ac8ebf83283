"""Swapping in: how well does host memory replace the device's own cache?

    python -m benchmarks.offloading_KV_cache.test_swap_in [--quick] [--json FILE] [--plot FILE.png]

1000 prompts of 1000 tokens, 1024 a step, 24 out, all submitted at once; the first part of all prompts is the same, and
was computed before: it is on the device (`device hit`), or only in host memory (`host hit`). With
the device's cache on, the first request loads it and the others find it there; with the cache off, every request loads
its own. `no cache` computes everything. One engine does it all, in turns; less on a CPU.

`parts_at` is the first hit rate at which host memory, with the device's cache off, is more than 5% behind the device's
own cache; 101 if there is none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, console, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant
from benchmarks.prefix_caching.options import conclude, parse
from benchmarks.tier_stand import (
    BELOW,
    BLOCK_TOKENS,
    DEVICE_OFF,
    DEVICE_ON,
    chosen,
    drop_below,
    expect_hits,
    expect_tokens,
    full_share,
    host_tiers,
    kv_bytes,
    make_tier_parser,
    median_ratio,
    open_stand,
    settings_of,
    warm_up,
)

GPU_SHAPE = "Qwen2.5-3B"
CLOSE = 0.95
GPU_BARS = {"host_over_gpu_80": f">= {CLOSE}"}
HIT_RATES = tuple(range(0, 101, 10))
NO_CACHE, DEVICE_HIT = "no cache", "device hit"
HOST_ON, HOST_OFF = "host hit, device cache on", "host hit, device cache off"
WAYS = {
    NO_CACHE: Variant("naive", has_tiers=False),
    DEVICE_HIT: Variant(DEVICE_ON, has_tiers=False),
    HOST_ON: Variant(DEVICE_ON),
    HOST_OFF: Variant(DEVICE_OFF),
}
GPU_QUICK_WAYS = (DEVICE_HIT, HOST_OFF)
MAX_SWAP_SPACE = 40 << 30


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    output_tokens: int
    repeats: int
    hit_rates: tuple[int, ...]
    ways: tuple[str, ...]
    max_num_requests: int
    max_num_batched_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    parser.add_argument("--output-tokens", type=int, help="how long an answer is")
    parser.add_argument("--hit-rates", type=int, nargs="+", help="in percent")
    parser.add_argument(
        "--ways", nargs="+", choices=tuple(WAYS), help="all, or with --quick on a GPU the last and device"
    )
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("offloading_KV_cache.test_swap_in", settings_of(arguments, size))
    has_bar = arguments.device == "cuda" and 80 in size.hit_rates and {DEVICE_HIT, HOST_OFF} <= set(size.ways)
    status = conclude(result, arguments, GPU_BARS if has_bar else {}, lambda: measure(arguments, size, result))
    if arguments.plot is not None:
        _draw(arguments, size, result)
    return status


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    run_tokens = size.prompts * (size.input_tokens + size.output_tokens + BLOCK_TOKENS)
    rows: list[dict[str, object]] = []
    with (
        host_tiers(min(2 * kv_bytes(arguments, run_tokens), MAX_SWAP_SPACE)) as tiers,
        open_stand(
            arguments,
            tiers,
            kv_tokens=run_tokens,
            max_model_len=size.input_tokens + size.output_tokens + 32,
            max_num_requests=size.max_num_requests,
            max_num_batched_tokens=size.max_num_batched_tokens,
        ) as stand,
    ):
        result.settings = {**result.settings, **tiers.settings, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, min(size.prompts, 8), size.input_tokens)
        for hit_rate in size.hit_rates:
            qps: dict[str, list[float]] = {name: [] for name in size.ways}
            for _ in range(size.repeats):
                prompts = maker.make(size.prompts, size.input_tokens, hit_rate)
                done = {name: _run(stand, name, prompts, size, hit_rate) for name in size.ways}
                for name, one in done.items():
                    expect_tokens(one, done[size.ways[0]], arguments.device, f"{name} at {hit_rate}%")
                    qps[name].append(one.qps)
            row: dict[str, object] = {"hit %": hit_rate}
            row |= {name: round(statistics.median(values), 3) for name, values in qps.items()}
            row |= _compare(arguments, hit_rate, qps, result)
            console.print(", ".join(f"{name} {value}" for name, value in row.items()))
            rows.append(row)
            result.rows.append(row)
    print_table(
        f"QPS, {size.prompts} prompts, {size.input_tokens} in, {size.output_tokens} out, medians of {size.repeats}",
        rows,
    )
    behind = [rate for rate in size.hit_rates if result.figures.get(f"host_over_device_{rate}", 1.0) < CLOSE]
    result.figures["parts_at"] = min(behind, default=101)


def _compare(
    arguments: argparse.Namespace, hit_rate: int, qps: dict[str, list[float]], result: Result
) -> dict[str, object]:
    """Ratios of host memory, with the device's cache off, to the other variants."""
    row: dict[str, object] = {}
    for name, other in (("device", DEVICE_HIT), ("none", NO_CACHE)):
        if HOST_OFF in qps and other in qps:
            ratio = median_ratio(qps[HOST_OFF], qps[other])
            row[f"host, cache off / {name}"] = round(ratio, 3)
            result.figures[f"host_over_{name}_{hit_rate}"] = ratio
            if name == "device" and arguments.device == "cuda" and hit_rate == 80:
                result.figures["host_over_gpu_80"] = ratio
    return row


def _run(stand: EngineStand, name: str, prompts: Sequence[Sequence[int]], size: Size, hit_rate: int) -> Round:
    """Compute the common part, untimed, and leave it where `name` says; then answer all prompts."""
    variant = WAYS[name]
    shared = size.input_tokens * hit_rate // 100
    what = f"{name} at {hit_rate}%"
    drop_below(stand)
    if shared >= BLOCK_TOKENS and name != NO_CACHE:
        stand.use(Variant(DEVICE_ON, has_tiers=variant.has_tiers))
        stand.run([prompts[0][:shared]], 1)
        if name != DEVICE_HIT:
            stand.use(variant)
    else:
        stand.use(variant)
    done = stand.run(prompts, size.output_tokens)
    share = full_share(size.input_tokens, shared)
    if name == NO_CACHE:
        expect_hits(done, (), 0.0, what)
    elif name == HOST_OFF:
        expect_hits(done, BELOW, share, what)
    else:
        expect_hits(done, ("device", *BELOW), share, what)
    return done


def _draw(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    draw_lines(
        {name: {float(str(row["hit %"])): float(str(row[name])) for row in result.rows} for name in size.ways},
        arguments.plot,
        title=f"{arguments.model_shape} on {result.settings['device']}: {size.prompts} prompts, "
        f"{size.input_tokens} tokens in, {size.output_tokens} out",
        x_label="share of the prompt that is a common prefix, %",
        y_label="requests per second",
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=500 if quick else 1000,
            input_tokens=1000,
            output_tokens=24,
            repeats=2 if quick else 1,
            hit_rates=(50, 80, 90, 100) if quick else HIT_RATES,
            ways=GPU_QUICK_WAYS if quick else tuple(WAYS),
            max_num_requests=1024,
            max_num_batched_tokens=1024,
        )
    else:
        size = Size(
            prompts=6 if quick else 16,
            input_tokens=500 if quick else 1000,
            output_tokens=8 if quick else 24,
            repeats=2 if quick else 3,
            hit_rates=(0, 50, 100) if quick else HIT_RATES,
            ways=tuple(WAYS),
            max_num_requests=8,
            max_num_batched_tokens=512,
        )
    names = ("prompts", "input_tokens", "output_tokens", "repeats", "hit_rates", "ways", "max_num_requests")
    return Size(**{**vars(size), **chosen(arguments, *names, "max_num_batched_tokens")})


if __name__ == "__main__":
    sys.exit(main())
