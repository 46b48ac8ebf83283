"""Requests per second over the share of a prompt that is a common prefix, for every block manager, sync and async-2.

    python -m benchmarks.prefix_caching.baseline [--quick] [--json FILE] [--plot FILE.png]

1000 prompts of 1000 random tokens, 24 tokens out, all submitted at once, 1024 tokens a step. The share is the first
part of all prompts of a run; the rest, and the common part of the next run, are new. The first request computes the
common part, the others wait for it.

All variants share one engine's weights and KV memory, and each run starts with an empty cache. The two of a pair take
turns on the same prompts (A B, B A, A B ...), and the median of the ratios counts. On a CPU they have an engine each,
take turns step by step, because these machines change their speed within seconds, and then change engines; and the pool
holds fewer blocks than the prompts fill, so that the cache evicts as one does that has run for a while.

Parts: `table` (all variants), `pairs` (the ratios, of --few prompts), `sweep` (the default variant, on a GPU),
`schedule` (the scheduler without a device) and `peer` (transformers' continuous batching, where it can do the work;
slow, so not with --quick unless it is named). vLLM's figures are those of Qwen2.5-7B's shape and its defaults: up to
1024 requests at a time, 16384 tokens a step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, console, print_table
from benchmarks.prefix_caching.engine_stand import (
    MANAGERS,
    VARIANTS,
    EngineStand,
    Job,
    PromptMaker,
    Round,
    Variant,
    kv_bytes_of,
)
from benchmarks.prefix_caching.options import conclude, device_settings, is_h200, make_parser, parse
from benchmarks.prefix_caching.plot import draw
from benchmarks.prefix_caching.schedule_cost import NUM_REQUESTS, measure_schedule
from benchmarks.prefix_caching.transformers_peer import PeerRound, measure_peer

BARS = {
    "pairs": {
        "prefix_over_naive_0": ">= 0.98",
        "yoco_over_naive_0": ">= 0.97",
        "yoco_over_naive_fork": ">= 0.97",
        "yoco_over_prefix_100": ">= 0.98",
    },
    "schedule": {"schedule_step_ms": "<= 1"},
}
"""The bars of each part."""

GPU_SHAPE = "Qwen2.5-3B"
VLLM_SHAPE = "Qwen2.5-7B"
HIT_RATES = tuple(range(0, 101, 10))
QUICK_HIT_RATES = (0, 50, 100)
VLLM_QPS = {0: 44.6, 30: 61.0, 50: 83.9, 80: 182.6, 90: 298.7, 100: 765.0}
"""vLLM 0.24.0 on an H200: Qwen2.5-7B's shape, 1000 prompts x 1000 tokens in, 24 out, its default settings."""

H200_BARS = {
    "pairs": {"async2_over_sync_min": ">= 1"},
    "sweep": {f"sweep_{hit_rate}": f">= {qps}" for hit_rate, qps in VLLM_QPS.items()},
}
"""Also: ahead of vLLM, and no schedule behind the plain one."""

PARTS = ("pairs", "table", "sweep", "schedule", "peer")
QUICK_PARTS = ("pairs", "table", "sweep", "schedule")
INPUT_TOKENS = 1000
OUTPUT_TOKENS = 24
DEFAULT = Variant("prefix_caching")
FORK_TOKENS = 2
"""Hit rates of prompts that part within their first block, as chats with a common beginning do."""


@dataclass(frozen=True)
class Size:
    """How much is measured. `prompts` counts those of the table and the sweep, `few` those of other parts."""

    prompts: int
    few: int
    pairs: int
    repeats: int
    hit_rates: tuple[int, ...]
    sweep_rates: tuple[int, ...]
    input_tokens: int
    max_num_requests: int
    max_num_batched_tokens: int
    kv_tokens: int | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "", GPU_SHAPE)
    parser.add_argument("--few", type=int, help="prompts of pairs and peer")
    parser.add_argument("--pairs", type=int, help="how many pairs each ratio is the median of (7; 3 with --quick)")
    parser.add_argument("--hit-rates", type=int, nargs="+", help="of table and sweep, in percent")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; without peer with --quick")
    parser.add_argument("--peer-timeout", type=float, default=60.0, help="seconds for transformers")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw QPS over hit rate (needs matplotlib)")
    arguments = parse(parser, argv)
    arguments.parts = arguments.parts or (QUICK_PARTS if arguments.quick else PARTS)
    size = _size(arguments)
    result = Result("prefix_caching.baseline", _settings(arguments, size))
    status = conclude(result, arguments, _bars(arguments, size), lambda: measure(arguments, size, result))
    if arguments.plot is not None:
        draw(result.rows, result.settings, arguments.plot)
    return status


def _bars(arguments: argparse.Namespace, size: Size) -> dict[str, str]:
    """The bars of the parts that are measured."""
    bars: dict[str, str] = {}
    for part in arguments.parts:
        bars |= BARS.get(part, {})
        if _is_beside_vllm(arguments):
            bars |= H200_BARS.get(part, {})
    absent = {f"sweep_{hit_rate}" for hit_rate in VLLM_QPS} - {f"sweep_{hit_rate}" for hit_rate in size.sweep_rates}
    return {name: bar for name, bar in bars.items() if name not in absent}


def _is_beside_vllm(arguments: argparse.Namespace) -> bool:
    return is_h200(arguments.device) and arguments.model_shape == VLLM_SHAPE


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    parts = arguments.parts
    if "schedule" in parts:
        measure_scheduling(result)
    if set(parts) == {"schedule"}:
        return
    started_at = time.perf_counter()
    console.print(f"loading {arguments.model_shape} on {arguments.device}")
    with contextlib.ExitStack() as stack:
        stand = stack.enter_context(_open(arguments, size))
        stands = [stand]
        if arguments.device == "cpu":
            stands.append(stack.enter_context(_open(arguments, size)))
        result.settings = {**result.settings, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stands, maker, size)
        console.print(f"ready after {time.perf_counter() - started_at:.0f} s")
        if "sweep" in parts and arguments.device == "cuda":
            measure_sweep(stand, maker, size, result, with_vllm=_is_beside_vllm(arguments))
        if "pairs" in parts:
            measure_pairs(stands, maker, size, result)
        if "table" in parts:
            measure_table(stand, maker, size, result)
        peer_rounds = _peer_rounds(maker, size) if "peer" in parts else []
        ours = _ours(stand, peer_rounds)
    if "peer" in parts:
        measure_transformers(arguments, size, peer_rounds, ours, result)


def measure_scheduling(result: Result) -> None:
    rows = []
    for manager in MANAGERS:
        cost = measure_schedule(manager)
        rows.append(
            {
                "manager": manager,
                "ms a step": round(cost.step_ms, 3),
                "p99": round(cost.p99_ms, 3),
                "ms to admit a prompt": round(cost.admit_ms, 3),
            }
        )
        worst = max(cost.step_ms, result.figures.get("schedule_step_ms", 0.0))
        result.figures["schedule_step_ms"] = worst
    print_table(f"scheduling + hashing of a decode step with {NUM_REQUESTS} running requests", rows)
    result.rows += [{"part": "schedule", **row} for row in rows]


def warm_up(stands: Sequence[EngineStand], maker: PromptMaker, size: Size) -> None:
    """Untimed runs of every kind of step: kernels are compiled, memory is touched."""
    for hit_rate in (0, 50, 100):
        prompts = maker.make(size.few, size.input_tokens, hit_rate)
        for stand in stands:
            stand.use(Variant("yoco"))
            stand.run(prompts, OUTPUT_TOKENS)


def measure_pairs(stands: Sequence[EngineStand], maker: PromptMaker, size: Size, result: Result) -> None:
    naive, prefix, yoco = Variant("naive"), Variant("prefix_caching"), Variant("yoco")
    comparisons: list[tuple[str, Variant, Variant, float]] = [
        ("prefix_over_naive_0", prefix, naive, 0),
        ("yoco_over_naive_0", yoco, naive, 0),
        ("yoco_over_naive_fork", yoco, naive, 100 * FORK_TOKENS / size.input_tokens),
        ("yoco_over_prefix_100", yoco, prefix, 100),
        ("async2_over_sync_min", naive, Variant("naive", "sync"), 0),
        ("async2_over_sync_min", prefix, Variant("prefix_caching", "sync"), 0),
        ("async2_over_sync_min", prefix, Variant("prefix_caching", "sync"), 100),
        ("async2_over_sync_min", yoco, Variant("yoco", "sync"), 100),
    ]
    rows = []
    all_ratios = []
    for number, (figure, left, right, hit_rate) in enumerate(comparisons, 1):
        ratios = _race(stands, maker, size, left, right, hit_rate)
        ratio = statistics.median(ratios)
        result.figures[figure] = min(ratio, result.figures.get(figure, ratio))
        row: dict[str, object] = {
            "pair": f"{left.name} / {right.name}",
            "hit %": hit_rate,
            "median": round(ratio, 4),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
        }
        console.print(f"pairs {number}/{len(comparisons)}: {row['pair']} at {hit_rate}%: {ratio:.3f}")
        rows.append(row)
        all_ratios.append([round(value, 4) for value in ratios])
    print_table(f"QPS ratios of {size.pairs} pairs, {size.few} prompts each", rows)
    result.rows += [{"part": "pairs", **row, "ratios": ratios} for row, ratios in zip(rows, all_ratios, strict=True)]


def measure_table(stand: EngineStand, maker: PromptMaker, size: Size, result: Result) -> None:
    rows: list[dict[str, object]] = []
    for hit_rate in size.hit_rates:
        qps: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
        for _ in range(size.repeats):
            prompts = maker.make(size.prompts, size.input_tokens, hit_rate)
            for variant in VARIANTS:
                qps[variant.name].append(_run(stand, variant, prompts, hit_rate).qps)
        row: dict[str, object] = {"hit %": hit_rate}
        row |= {name: round(statistics.median(values), 2) for name, values in qps.items()}
        console.print(f"table: {hit_rate}% done")
        rows.append(row)
        result.rows.append({"part": "table", **row})
    print_table(f"QPS, {size.prompts} prompts, medians of {size.repeats}", rows)


def measure_sweep(stand: EngineStand, maker: PromptMaker, size: Size, result: Result, *, with_vllm: bool) -> None:
    rows = []
    for hit_rate in size.sweep_rates:
        done = _run(stand, DEFAULT, maker.make(size.prompts, size.input_tokens, hit_rate), hit_rate)
        result.figures[f"sweep_{hit_rate}"] = done.qps
        row: dict[str, object] = {
            "hit %": hit_rate,
            "prompts": size.prompts,
            "QPS": round(done.qps, 2),
            "s": round(done.seconds, 2),
            "cached": round(done.cached_share, 3),
            "steps": done.num_steps,
            "schedule ms a step": round(done.schedule_ms, 3),
            "TTFT p50 s": round(statistics.median(answer.ttft_s for answer in done.answers), 3),
            "TPOT p50 ms": round(1000 * statistics.median(one.time_per_output_token_s for one in done.answers), 2),
        }
        if with_vllm and hit_rate in VLLM_QPS:
            row |= {"vLLM 0.24": VLLM_QPS[hit_rate], "of vLLM": round(done.qps / VLLM_QPS[hit_rate], 3)}
        console.print(f"sweep: {hit_rate}%: {done.qps:.1f} QPS in {done.seconds:.1f} s")
        rows.append(row)
    print_table(
        f"{DEFAULT.name}, {size.prompts} prompts, at most {size.max_num_requests} requests at a time and "
        f"{size.max_num_batched_tokens} tokens a step",
        rows,
    )
    result.rows += [{"part": "sweep", **row} for row in rows]


def measure_transformers(
    arguments: argparse.Namespace, size: Size, rounds: Sequence[PeerRound], ours: dict[str, Round], result: Result
) -> None:
    peer = measure_peer(
        arguments.model_shape,
        arguments.device,
        rounds,
        max_batch_tokens=size.max_num_batched_tokens,
        timeout_s=arguments.peer_timeout,
    )
    rows: list[dict[str, object]] = []
    for one in rounds:
        row: dict[str, object] = {
            "prompts": f"{len(one.prompts)}, {one.name}% hits",
            f"{DEFAULT.name} QPS": round(ours[one.name].qps, 2),
        }
        if one.name in peer.qps:
            over = ours[one.name].qps / peer.qps[one.name]
            row |= {"transformers QPS": round(peer.qps[one.name], 2), "over": round(over, 2), **peer.details}
            result.figures[f"over_transformers_{one.name}"] = over
        else:
            row["absent"] = peer.absent or "no result"
        rows.append(row)
    print_table("transformers' generate_batch", rows)
    result.rows += [{"part": "peer", **row} for row in rows]


def _race(
    stands: Sequence[EngineStand], maker: PromptMaker, size: Size, left: Variant, right: Variant, hit_rate: float
) -> list[float]:
    """QPS of `left` over that of `right`, pair by pair. The first of a pair alternates."""
    ratios = []
    for number in range(size.pairs):
        prompts = maker.make(size.few, size.input_tokens, hit_rate)
        seconds = {left: 0.0, right: 0.0}
        if len(stands) == 1:
            for variant in (left, right) if number % 2 == 0 else (right, left):
                seconds[variant] = _run(stands[0], variant, prompts, hit_rate).seconds
        else:  # each on either engine: where their memory lies is worth a percent
            for order in ((left, right), (right, left)):
                for variant, job in _run_side_by_side(stands, order, prompts, hit_rate).items():
                    seconds[variant] += job.seconds
        ratios.append(seconds[right] / seconds[left])
    return ratios


def _run_side_by_side(
    stands: Sequence[EngineStand], order: Sequence[Variant], prompts: Sequence[Sequence[int]], hit_rate: float
) -> dict[Variant, Job]:
    """Run both from empty caches, in turns step by step: what disturbs the machine disturbs both."""
    jobs = {}
    gc.collect()
    for stand, variant in zip(stands, order, strict=True):
        stand.use(variant)
        jobs[variant] = stand.start(prompts, OUTPUT_TOKENS)
    while not all(job.is_done for job in jobs.values()):
        for job in jobs.values():
            if not job.is_done:
                job.step()
    for variant, job in jobs.items():
        _check_hits(variant, hit_rate, len(prompts), job.cached_share)
    return jobs


def _run(stand: EngineStand, variant: Variant, prompts: Sequence[Sequence[int]], hit_rate: float) -> Round:
    """Run from an empty cache."""
    stand.use(variant)
    done = stand.run(prompts, OUTPUT_TOKENS)
    _check_hits(variant, hit_rate, len(prompts), done.cached_share)
    return done


def _check_hits(variant: Variant, hit_rate: float, num_prompts: int, cached_share: float) -> None:
    """Check that hits match the hit rate; a request may miss the part of a block."""
    reuses = variant.manager in ("prefix_caching", "yoco")
    shared = hit_rate / 100 * (1 - 1 / num_prompts) if reuses else 0.0
    if not shared - 0.04 <= cached_share <= shared + 0.001:
        console.print(f"[yellow]{variant.name} at {hit_rate}%: {cached_share:.3f} of the tokens were cached")


def _peer_rounds(maker: PromptMaker, size: Size) -> list[PeerRound]:
    return [
        PeerRound(
            str(hit_rate),
            maker.make(size.few, size.input_tokens, hit_rate),
            maker.make(size.few, size.input_tokens, hit_rate),
            OUTPUT_TOKENS,
        )
        for hit_rate in (0, 100)
    ]


def _ours(stand: EngineStand, rounds: Sequence[PeerRound]) -> dict[str, Round]:
    return {one.name: _run(stand, DEFAULT, one.prompts, int(one.name)) for one in rounds}


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=300 if quick else 1000,
            few=32 if quick else 64,
            pairs=3 if quick else 7,
            repeats=1,
            hit_rates=QUICK_HIT_RATES if quick else HIT_RATES,
            sweep_rates=tuple(VLLM_QPS),
            input_tokens=INPUT_TOKENS,
            max_num_requests=1024,
            max_num_batched_tokens=1024,
            kv_tokens=None,
        )
    else:
        size = Size(
            prompts=6 if quick else 12,
            few=6 if quick else 12,
            pairs=3 if quick else 7,
            repeats=1,
            hit_rates=QUICK_HIT_RATES if quick else HIT_RATES,
            sweep_rates=tuple(VLLM_QPS),
            input_tokens=500 if quick else INPUT_TOKENS,
            max_num_requests=3 if quick else 6,
            max_num_batched_tokens=1024,
            kv_tokens=None,
        )
    chosen = {
        "prompts": arguments.prompts,
        "few": arguments.few,
        "pairs": arguments.pairs,
        "repeats": arguments.repeats,
        "hit_rates": tuple(arguments.hit_rates) if arguments.hit_rates else None,
        "sweep_rates": tuple(arguments.hit_rates) if arguments.hit_rates else None,
        "max_num_requests": arguments.max_num_requests,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
    }
    values = {**vars(size), **{name: value for name, value in chosen.items() if value is not None}}
    if arguments.device == "cpu":
        values["kv_tokens"] = (values["input_tokens"] + 3 * OUTPUT_TOKENS) * (values["max_num_requests"] + 2)
    return Size(**values)


def _settings(arguments: argparse.Namespace, size: Size) -> dict[str, object]:
    return {
        "shape": arguments.model_shape,
        **device_settings(arguments.device),
        "input_tokens": size.input_tokens,
        "output_tokens": OUTPUT_TOKENS,
        "prompts": size.prompts,
        "few": size.few,
        "pairs": size.pairs,
        "repeats": size.repeats,
        "quick": arguments.quick,
        "parts": list(arguments.parts),
    }


def _open(arguments: argparse.Namespace, size: Size) -> EngineStand:
    space = None if size.kv_tokens is None else kv_bytes_of(arguments.model_shape, size.kv_tokens, itemsize=4)
    return EngineStand(
        arguments.model_shape,
        arguments.device,
        max_model_len=2048,
        max_num_requests=size.max_num_requests,
        max_num_batched_tokens=size.max_num_batched_tokens,
        kv_cache_space=space,
    )


if __name__ == "__main__":
    sys.exit(main())
