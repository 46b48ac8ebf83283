"""Transferring in: the worth of a cache server to an engine that was restarted.

    python -m benchmarks.remote_kv_cache.test_transfer_in [--quick] [--tcp] [--json FILE] [--plot FILE.png]

1000 prompts of 1000 tokens, 24 tokens out, all submitted at once; the first part of all prompts is the same. The first
run computes them, into the server. Then the engine is closed and another one started, which runs the same prompts and
finds them all in the server. Requests per second of both, with the device's cache on and off. Less on a CPU. Hit rates
whose prompts the server holds side by side share an engine's start.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.model_configs import MODEL_CONFIGS
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant
from benchmarks.prefix_caching.options import parse
from benchmarks.tier_stand import (
    BELOW,
    BLOCK_TOKENS,
    DEVICE_OFF,
    DEVICE_ON,
    Tiers,
    add_server_options,
    chosen,
    drop_below,
    expect_hits,
    expect_tokens,
    full_share,
    kv_bytes,
    make_tier_parser,
    open_stand,
    server_tiers,
    settings_of,
    shown_shares,
    warm_up,
)
from kvtier.engine.schedule.block_manager import BlockManagerName

GPU_SHAPE = "Qwen2.5-3B"
HIT_RATES = tuple(range(0, 101, 10))
QUICK_HIT_RATES = (0, 50, 100)
FIGURE = "transfer_in_second_over_first"
NUM_WARM_UP = 4


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    output_tokens: int
    repeats: int
    hit_rates: tuple[int, ...]
    managers: tuple[BlockManagerName, ...]
    max_num_requests: int
    max_num_batched_tokens: int


@dataclass
class Job:
    """The same prompts twice."""

    manager: BlockManagerName
    hit_rate: int
    prompts: list[list[int]]
    first: Round | None = None
    second: Round | None = None


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    add_server_options(parser)
    parser.add_argument("--output-tokens", type=int, help="how long an answer is")
    parser.add_argument("--hit-rates", type=int, nargs="+", help="in percent")
    parser.add_argument("--managers", nargs="+", choices=(DEVICE_ON, DEVICE_OFF), help="device cache on, off, or both")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("remote_kv_cache.test_transfer_in", settings_of(arguments, size))
    try:
        measure(arguments, size, result)
        print_figures(result.figures, {FIGURE: ">= 2.5"})
    finally:  # keep the results from before a failure
        result.write(arguments.json)
    if arguments.plot is not None:
        _draw(arguments, size, result)


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    run_tokens = size.prompts * (size.input_tokens + size.output_tokens + BLOCK_TOKENS)
    nbytes = kv_bytes(arguments, 5 * run_tokens // 4 + NUM_WARM_UP * size.input_tokens)
    jobs: list[Job] = []
    with server_tiers(nbytes, is_tcp=arguments.tcp, swap_space=arguments.swap_space) as tiers:
        maker = PromptMaker(int(str(MODEL_CONFIGS[arguments.model_shape]["vocab_size"])))
        stored: list[Job] = []
        for group in [*_groups(size), []]:
            with _open(arguments, size, tiers) as stand:
                result.settings = {**result.settings, "tiers": tiers.name, **stand.settings()}
                warm_up(stand, maker, min(NUM_WARM_UP, size.prompts), size.input_tokens)
                for job in stored:  # what an engine before this one has left in the server
                    _run_second(arguments, stand, job, size)
                drop_below(stand)
                stored = []
                for manager, hit_rate in group:
                    job = Job(manager, hit_rate, maker.make(size.prompts, size.input_tokens, hit_rate))
                    _run_first(stand, job, size)
                    stored.append(job)
                jobs += stored
            _report(jobs, size, result)
    print_table(
        f"QPS before and after a restart, {size.prompts} prompts, {size.input_tokens} in, {size.output_tokens} out, "
        f"medians of {size.repeats}",
        result.rows,
    )


def _groups(size: Size) -> list[list[tuple[BlockManagerName, int]]]:
    """The runs, in groups whose new tokens are at most those of one run without hits."""
    groups: list[list[tuple[BlockManagerName, int]]] = []
    for manager in size.managers:
        room: list[int] = []
        own: list[list[tuple[BlockManagerName, int]]] = []
        for hit_rate in sorted(size.hit_rates) * size.repeats:
            needed = 100 - hit_rate + 100 // size.prompts  # percent of a run's tokens: the rest, and the common part
            place = next((place for place, left in enumerate(room) if left >= needed), None)
            if place is None:
                place = len(room)
                room.append(max(100, needed))
                own.append([])
            room[place] -= needed
            own[place].append((manager, hit_rate))
        groups += own
    return groups


def _run_first(stand: EngineStand, job: Job, size: Size) -> None:
    stand.use(Variant(job.manager))
    job.first = stand.run(job.prompts, size.output_tokens)
    if not job.hit_rate:
        expect_hits(job.first, (), 0.0, "new prompts")
    stand.settle()
    console.print(f"device cache {_on_off(job)}, {job.hit_rate}%, first: {job.first.qps:.2f} QPS")


def _run_second(arguments: argparse.Namespace, stand: EngineStand, job: Job, size: Size) -> None:
    stand.use(Variant(job.manager))
    job.second = stand.run(job.prompts, size.output_tokens)
    what = f"device cache {_on_off(job)}, {job.hit_rate}%, after a restart"
    tiers = ("device", *BELOW) if job.manager == DEVICE_ON else BELOW
    expect_hits(job.second, tiers, full_share(size.input_tokens), what)
    assert job.first is not None
    expect_tokens(job.second, job.first, arguments.device, what)
    console.print(f"{what}: {job.second.qps:.2f} QPS from {shown_shares(job.second.shares)}")


def _report(jobs: Sequence[Job], size: Size, result: Result) -> None:
    """Ratios for the hit rates that were run twice."""
    result.rows.clear()
    for manager in size.managers:
        for hit_rate in size.hit_rates:
            these = [job for job in jobs if (job.manager, job.hit_rate) == (manager, hit_rate)]
            if not these or any(job.second is None for job in these):
                continue
            first = [job.first.qps for job in these if job.first is not None]
            second = [job.second.qps for job in these if job.second is not None]
            ratios = [one / other for one, other in zip(second, first, strict=True)]
            ratio = statistics.median(ratios)
            last = these[-1]
            assert last.first is not None
            assert last.second is not None
            result.rows.append(
                {
                    "hit %": hit_rate,
                    "device cache": _on_off(these[0]),
                    "first QPS": round(statistics.median(first), 3),
                    "second QPS": round(statistics.median(second), 3),
                    "second / first": round(ratio, 3),
                    "least": round(min(ratios), 3),
                    "first from": shown_shares(last.first.shares),
                    "second from": shown_shares(last.second.shares),
                }
            )
            if hit_rate == 0:
                result.figures[FIGURE] = min(ratio, result.figures.get(FIGURE, ratio))


def _on_off(job: Job) -> str:
    return "on" if job.manager == DEVICE_ON else "off"


def _open(arguments: argparse.Namespace, size: Size, tiers: Tiers) -> EngineStand:
    return open_stand(
        arguments,
        tiers,
        kv_tokens=size.prompts * (size.input_tokens + size.output_tokens + BLOCK_TOKENS),
        max_model_len=size.input_tokens + size.output_tokens + 32,
        max_num_requests=size.max_num_requests,
        max_num_batched_tokens=size.max_num_batched_tokens,
    )


def _draw(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    lines: dict[str, dict[float, float]] = {}
    for row in result.rows:
        for column in ("first", "second"):
            name = f"{column} run, device cache {row['device cache']}"
            lines.setdefault(name, {})[float(str(row["hit %"]))] = float(str(row[f"{column} QPS"]))
    draw_lines(
        lines,
        arguments.plot,
        title=f"{arguments.model_shape} on {result.settings['device']}: {size.prompts} prompts, "
        f"{size.input_tokens} tokens in, {size.output_tokens} out, {result.settings['tiers']}",
        x_label="share of the prompt that is a common prefix, %",
        y_label="requests per second",
        style_of=lambda name: {"linestyle": "--" if name.startswith("first") else "-"},
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=200 if quick else 1000,
            input_tokens=1000,
            output_tokens=24,
            repeats=1,
            hit_rates=QUICK_HIT_RATES if quick else HIT_RATES,
            managers=(DEVICE_OFF,) if quick else (DEVICE_OFF, DEVICE_ON),
            max_num_requests=256,
            max_num_batched_tokens=1024,
        )
    else:
        size = Size(
            prompts=4 if quick else 8,
            input_tokens=800 if quick else 1000,
            output_tokens=4,
            repeats=3,
            hit_rates=QUICK_HIT_RATES if quick else HIT_RATES,
            managers=(DEVICE_OFF,) if quick else (DEVICE_OFF, DEVICE_ON),
            max_num_requests=8,
            max_num_batched_tokens=512,
        )
    names = ("prompts", "input_tokens", "output_tokens", "repeats", "hit_rates", "managers", "max_num_requests")
    return Size(**{**vars(size), **chosen(arguments, *names, "max_num_batched_tokens")})


if __name__ == "__main__":
    main()
