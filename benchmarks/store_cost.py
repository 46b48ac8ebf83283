"""The cost of storing to the engine: requests per second with and without the tiers that store full blocks.

Prompts are new, so that everything is computed and stored. Both sides share an engine and take turns (A B, B A ...) run
by run: background work of one must not be charged to the other. The speed of a shared machine changes within seconds,
so runs are short and compared with their neighbours: a pair's ratio is the median over its turns, and the median of the
pairs' ratios is the result.

On a CPU the clock is wall time without the time for which the engine's thread waited for a core that other programs
had. Waiting for the tiers' threads, and for Python's lock, is included. `CPU` is the ratio of
the CPU times of all threads of the process, copies included.

`--most-steps` bounds a run: if a step computes few tokens, there are fewer prompts, then shorter ones. Without it the
smallest steps take most of the time and show the same: a run of many steps is compared with one other, not with
several.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from benchmarks.harness import Result, console, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.prefix_caching.engine_stand import SCHEDULES, EngineStand, PromptMaker, Variant
from benchmarks.prefix_caching.options import conclude, parse
from benchmarks.tier_stand import (
    BELOW,
    BLOCK_TOKENS,
    DEVICE_OFF,
    DEVICE_ON,
    Tiers,
    chosen,
    expect_hits,
    expect_tokens,
    full_share,
    kv_bytes,
    open_stand,
    settings_of,
    warm_up,
)
from kvtier.engine.schedule.block_manager import BlockManagerName

GPU_SHAPE = "Qwen2.5-3B"
BARS = {"cpu": ">= 0.97", "cuda": ">= 0.98"}
_NUM_SHORT = 8
_SHORT_TOKENS = 272
_MANY_STEPS = 256

BATCHED_TOKENS = (1024, 768, 512, 384, 256, 128, 64, 32)

OpenTiers = Callable[[int], AbstractContextManager[Tiers]]


@dataclass(frozen=True)
class Size:
    """How much is measured: every cell is `pairs` pairs of `turns` runs of all prompts on each side.

    `most_steps` bounds a run; `of` shrinks the prompts accordingly.
    """

    prompts: int
    input_tokens: int
    pairs: int
    turns: int
    batched_tokens: tuple[int, ...]
    managers: tuple[BlockManagerName, ...]
    schedules: tuple[str, ...]
    most_steps: int | None

    def of(self, batched_tokens: int) -> Size:
        """The size of a cell whose steps compute `batched_tokens` at most."""
        if self.most_steps is None:
            has_many = self.prompts * self.input_tokens > _MANY_STEPS * batched_tokens
            return replace(self, pairs=1) if has_many else self
        most_tokens = max(BLOCK_TOKENS + 1, self.most_steps * batched_tokens)
        input_tokens = min(self.input_tokens, most_tokens)
        return replace(self, prompts=max(1, min(self.prompts, most_tokens // input_tokens)), input_tokens=input_tokens)


@dataclass(frozen=True)
class Cell:
    manager: BlockManagerName
    schedule: str
    batched_tokens: int

    def variant(self, *, has_tiers: bool) -> Variant:
        return Variant(self.manager, self.schedule, has_tiers, self.batched_tokens)


@dataclass
class Measured:
    """Seconds for all prompts, with and without the tiers, and each pair's ratio. `cpu_s` and `server_s` are sums."""

    with_s: list[float] = field(default_factory=list)
    without_s: list[float] = field(default_factory=list)
    cpu_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    server_s: float = 0.0
    ratios: list[float] = field(default_factory=list)


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    benchmark: str,
    figure: Callable[[argparse.Namespace], str],
    tiers_of: Callable[[argparse.Namespace], OpenTiers],
) -> int:
    """Run the whole benchmark. Returns 1 if it misses its bar. `figure` names the worst cell's median ratio."""
    parser.add_argument(
        "--pairs", type=int, help="how many pairs each ratio is the median of (7; 3 on a GPU or with --quick)"
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, help="default: both")
    parser.add_argument("--most-steps", type=int, help="how many steps a run has at most")
    parser.add_argument("--turns", type=int, help="how many turns of each side make a pair")
    parser.add_argument("--batched-tokens", type=int, nargs="+", help="values of max_num_batched_tokens")
    parser.add_argument("--managers", nargs="+", choices=(DEVICE_ON, DEVICE_OFF), help="device cache on, off, or both")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result(benchmark, settings_of(arguments, size, "time on the wall less waiting for a core"))
    name = figure(arguments)
    status = conclude(
        result,
        arguments,
        {name: BARS[arguments.device]},
        lambda: measure(arguments, size, tiers_of(arguments), name, result),
    )
    if arguments.plot is not None:
        _draw(arguments, size, result)
    return status


def figure_name(name: str, arguments: argparse.Namespace) -> str:
    """Figures of a GPU have their own names."""
    return f"{name}_gpu_min" if arguments.device == "cuda" else f"{name}_min"


def measure(arguments: argparse.Namespace, size: Size, open_tiers: OpenTiers, figure: str, result: Result) -> None:
    run_tokens = size.prompts * (size.input_tokens + 16)
    check_tokens = run_tokens + _NUM_SHORT * (min(_SHORT_TOKENS, size.input_tokens) + 16)
    cells = [
        Cell(manager, schedule, count)
        for manager in size.managers
        for count in size.batched_tokens
        for schedule in size.schedules
    ]
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        tiers = stack.enter_context(open_tiers(kv_bytes(arguments, 2 * run_tokens + check_tokens)))
        stand = stack.enter_context(
            open_stand(
                arguments,
                tiers,
                kv_tokens=2 * run_tokens,
                clock=stack.enter_context(_undisturbed()) if arguments.device == "cpu" else time.perf_counter,
                max_model_len=size.input_tokens + 32,
                max_num_requests=size.prompts,
                max_num_batched_tokens=max(size.batched_tokens),
                always_load=True,
            )
        )
        result.settings = {**result.settings, "tiers": tiers.name, **stand.settings()}
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, size.prompts, size.input_tokens)
        for number, cell in enumerate(cells, 1):
            measured = _measure_cell(arguments, stand, maker, size.of(cell.batched_tokens), cell, tiers)
            ratio = statistics.median(measured.ratios)
            result.figures[figure] = min(ratio, result.figures.get(figure, ratio))
            row = _row(cell, size.of(cell.batched_tokens), measured, tiers)
            console.print(f"{number}/{len(cells)}: {cell.batched_tokens} tokens a step, {cell.schedule}: {ratio:.3f}")
            rows.append(row)
            result.rows.append({**row, "ratios": [round(value, 4) for value in measured.ratios]})
    title = (
        f"QPS with {tiers.name} / without, medians of {size.pairs} pairs, at most {size.prompts} x {size.input_tokens}"
    )
    print_table(title, rows)


def _measure_cell(
    arguments: argparse.Namespace, stand: EngineStand, maker: PromptMaker, size: Size, cell: Cell, tiers: Tiers
) -> Measured:
    measured = Measured()
    server_s = tiers.server_cpu_s()
    for pair in range(size.pairs):
        turns: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(size.turns):
            first = (pair + turn) % 2 == 0
            for has_tiers in (first, not first):
                seconds, cpu_s = _run(stand, maker, size, cell, has_tiers=has_tiers)
                turns[has_tiers].append(seconds)
                measured.cpu_s[has_tiers] += cpu_s
        measured.with_s.append(statistics.median(turns[True]))
        measured.without_s.append(statistics.median(turns[False]))
        measured.ratios.append(
            statistics.median(without / having for without, having in zip(turns[False], turns[True], strict=True))
        )
    measured.server_s = tiers.server_cpu_s() - server_s
    _check(arguments, stand, maker, size, cell)
    return measured


def _run(stand: EngineStand, maker: PromptMaker, size: Size, cell: Cell, *, has_tiers: bool) -> tuple[float, float]:
    """Seconds for all prompts, and the CPU time of all threads until everything is stored."""
    stand.use(cell.variant(has_tiers=has_tiers))
    prompts = maker.make(size.prompts, size.input_tokens)
    started_at = time.process_time()
    done = stand.run(prompts, 1)
    stand.settle()
    cpu_s = time.process_time() - started_at
    expect_hits(done, (), 0.0, f"new prompts, {'with' if has_tiers else 'without'} tiers")
    return done.seconds, cpu_s


@contextlib.contextmanager
def _undisturbed() -> Iterator[Callable[[], float]]:
    """A clock of this thread that stands still while the thread could run and no core was free."""
    with open(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat") as file:

        def clock() -> float:
            file.seek(0)
            return time.perf_counter() - int(file.read().split()[1]) / 1e9

        yield clock


def _check(arguments: argparse.Namespace, stand: EngineStand, maker: PromptMaker, size: Size, cell: Cell) -> None:
    """Check that everything computed was stored: the same prompts, with nothing on the device, are loaded from there.

    Short prompts too, so that one close call among the first tokens does not matter.
    """
    prompts = maker.make(size.prompts, size.input_tokens)
    prompts += maker.make(_NUM_SHORT, min(_SHORT_TOKENS, size.input_tokens))
    stand.use(cell.variant(has_tiers=True))
    computed = stand.run(prompts, 1)
    stand.use(Variant(DEVICE_OFF, cell.schedule))
    loaded = stand.run(prompts, 1)
    lengths = [len(prompt) for prompt in prompts]
    share = sum(length * full_share(length) for length in lengths) / sum(lengths)
    expect_hits(loaded, BELOW, share, "what was just stored")
    expect_tokens(loaded, computed, arguments.device, "what was just stored")


def _row(cell: Cell, size: Size, measured: Measured, tiers: Tiers) -> dict[str, object]:
    row: dict[str, object] = {
        "tokens a step": cell.batched_tokens,
        "schedule": cell.schedule,
        "device cache": "on" if cell.manager == DEVICE_ON else "off",
        "prompts": f"{size.prompts} x {size.input_tokens}",
        "QPS without": round(size.prompts / statistics.median(measured.without_s), 3),
        "QPS with": round(size.prompts / statistics.median(measured.with_s), 3),
        "median": round(statistics.median(measured.ratios), 4),
        "least": round(min(measured.ratios), 4),
        "most": round(max(measured.ratios), 4),
        "CPU": round(measured.cpu_s[False] / measured.cpu_s[True], 4),
    }
    if tiers.server is not None:
        row["server's CPU, %"] = round(100 * measured.server_s / measured.cpu_s[True], 1)
    return row


def _draw(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    lines: dict[str, dict[float, float]] = {}
    for row in result.rows:
        name = f"{row['schedule']}, device cache {row['device cache']}"
        for side in ("without", "with"):
            points: Mapping[float, float] = {float(str(row["tokens a step"])): float(str(row[f"QPS {side}"]))}
            lines.setdefault(f"{side}, {name}", {}).update(points)
    draw_lines(
        lines,
        arguments.plot,
        title=f"{arguments.model_shape} on {result.settings['device']}: {size.prompts} prompts x {size.input_tokens}, "
        f"with {result.settings['tiers']} and without",
        x_label="max_num_batched_tokens",
        y_label="requests per second",
        has_log_x=True,
        style_of=lambda name: {"linestyle": "--" if name.startswith("without") else "-"},
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=4,
            input_tokens=8192,
            pairs=3,
            turns=1,
            batched_tokens=(1024, 256, 64) if quick else BATCHED_TOKENS,
            managers=(DEVICE_ON,) if quick else (DEVICE_ON, DEVICE_OFF),
            schedules=SCHEDULES,
            most_steps=128 if quick else None,
        )
    else:
        size = Size(
            prompts=1 if quick else 2,
            input_tokens=512,
            pairs=3 if quick else 7,
            turns=3 if quick else 15,
            batched_tokens=(512, 32) if quick else (512, 256, 128, 64, 32),
            managers=(DEVICE_ON,) if quick else (DEVICE_ON, DEVICE_OFF),
            schedules=SCHEDULES,
            most_steps=None,
        )
    names = ("prompts", "input_tokens", "pairs", "turns", "batched_tokens", "managers", "schedules", "most_steps")
    return replace(size, **chosen(arguments, *names))
