"""The cost of the plug-in to an engine without hits.

    .venv-vllm/bin/python -m benchmarks.vllm.test_overhead [--quick] [--json FILE]

Two engines of real vLLM on a CPU, one with the plug-in and one without, answer the same prompts that neither has seen,
in turns: tokens per second with over without, as the median of the pairs. Everything is saved to a cache server with a
disk meanwhile (`--memory-only`: without one); a turn begins when the saves of the one before are done.

It also shows the time that vLLM's scheduler and worker threads spend in the connector, step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, console, finish, print_table
from benchmarks.vllm.quiet import OtherWork, wait_until_quiet
from benchmarks.vllm.stand import (
    VllmEngine,
    engine,
    kv_bytes_per_token,
    kvtier_transfer,
    save_model,
    stand_settings,
    tokens_of,
    wait_until,
)
from benchmarks.vllm.timed_connector import FOLDER_VARIABLE
from kvtier.testing.servers import cache_server

WITH, WITHOUT = "kvtier", "no connector"
SIDES = ("scheduler", "worker")
BARS = {"vllm_overhead_ratio": ">= 0.98", "connector_step_ms": "<= 1"}


@dataclass(frozen=True)
class Size:
    pairs: int
    prompts: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Turn:
    """One engine's answers to the prompts of a pair."""

    tokens_per_s: float
    saving_s: float
    """The time for which its processes worked after the last answer."""


@dataclass(frozen=True)
class StepTimes:
    """The time of one side of the connector, step by step and by call."""

    steps_s: list[float]
    calls_s: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    size = Size(
        arguments.repeats or (3 if arguments.quick else 7),
        8 if arguments.quick else 16,
        input_tokens=256,
        output_tokens=48,
    )
    others = OtherWork()
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-", dir=arguments.folder) as scratch:
        turns, steps = measure(Path(scratch), size, others, memory_only=arguments.memory_only)
    settings = stand_settings() | {
        "others_cpu": round(others.share, 3),
        "pairs": size.pairs,
        "prompts": size.prompts,
        "input_tokens": size.input_tokens,
        "output_tokens": size.output_tokens,
        "memory_only": arguments.memory_only,
        "quick": arguments.quick,
        "bars": BARS,
    }
    result = Result("vllm.test_overhead", settings, [], _figures(turns, steps))
    pair_rows, step_rows = _pair_rows(turns), _step_rows(steps)
    result.rows += [*pair_rows, *step_rows]
    print_table(f"{size.prompts} new prompts of {size.input_tokens} tokens, {size.output_tokens} out", pair_rows)
    print_table("time in the connector, by step", step_rows)
    others.tell(console.print)
    return finish(result, BARS, arguments.json)


def measure(
    scratch: Path, size: Size, others: OtherWork, *, memory_only: bool
) -> tuple[dict[str, list[Turn]], dict[str, StepTimes]]:
    model, disk, times = scratch / "model", scratch / "disk", scratch / "times"
    save_model(model)
    times.mkdir()
    os.environ[FOLDER_VARIABLE] = str(times)
    disk_options = () if memory_only else ("--folder", str(disk), "--disk", "8GiB")
    turns: dict[str, list[Turn]] = {WITH: [], WITHOUT: []}
    with cache_server(*disk_options, memory=str(_memory_bytes(size))) as server:
        transfer = kvtier_transfer(
            server.unix, connector="TimedKvtierConnector", module="benchmarks.vllm.timed_connector"
        )
        console.print("starting two engines")
        with engine(model) as without, engine(model, transfer) as with_plugin:
            engines = {WITHOUT: without, WITH: with_plugin}
            for number in range(size.pairs + 1):  # the first is for warming up
                names = list(engines) if number % 2 else list(engines)[::-1]
                for name in names:
                    turn = _turn(engines[name], size, number, others)
                    if number:
                        turns[name].append(turn)
                        console.print(f"  pair {number}, {name}: {turn.tokens_per_s:.1f} tokens/s")
    return turns, {side: _read_times(times, side) for side in SIDES}


def _turn(one: VllmEngine, size: Size, number: int, others: OtherWork) -> Turn:
    prompts = [tokens_of(size.input_tokens, number, position) for position in range(size.prompts)]
    wait_until_quiet()
    with others.watched():
        answers, seconds = one.ask_all(prompts, num_tokens=size.output_tokens)
    saving_s = wait_until_quiet()
    if any(answer.num_cached or len(answer.tokens) != size.output_tokens for answer in answers):
        raise AssertionError("a prompt that was never asked was found in a cache, or not answered")
    return Turn(size.prompts * (size.input_tokens + size.output_tokens) / seconds, saving_s)


def _memory_bytes(size: Size) -> int:
    """Enough for everything that is saved."""
    tokens = (size.pairs + 2) * size.prompts * (size.input_tokens + size.output_tokens)
    return tokens * kv_bytes_per_token() + (256 << 20)


def _read_times(folder: Path, side: str) -> StepTimes:
    """The file that the process of this side writes when it ends."""
    file = folder / f"{side}.json"
    wait_until(file.exists, f"the times of the connector's {side} side")
    document = json.loads(file.read_text())
    return StepTimes(document["steps_s"], document["calls_s"])


def _figures(turns: Mapping[str, Sequence[Turn]], steps: Mapping[str, StepTimes]) -> dict[str, float]:
    return {
        "vllm_overhead_ratio": statistics.median(_ratios(turns)),
        "connector_step_ms": sum(1000 * statistics.fmean(steps[side].steps_s) for side in SIDES),
    }


def _ratios(turns: Mapping[str, Sequence[Turn]]) -> list[float]:
    return [ours.tokens_per_s / plain.tokens_per_s for ours, plain in zip(turns[WITH], turns[WITHOUT], strict=True)]


def _pair_rows(turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, object]]:
    return [
        {
            "pair": number,
            "without, tokens/s": round(plain.tokens_per_s, 1),
            "with, tokens/s": round(ours.tokens_per_s, 1),
            "ratio": round(ours.tokens_per_s / plain.tokens_per_s, 4),
            "saving after it, s": round(ours.saving_s - plain.saving_s, 2),
        }
        for number, (plain, ours) in enumerate(zip(turns[WITHOUT], turns[WITH], strict=True), 1)
    ]


def _step_rows(steps: Mapping[str, StepTimes]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for side in SIDES:
        values = sorted(1000 * value for value in steps[side].steps_s)
        call, seconds = max(steps[side].calls_s.items(), key=lambda item: item[1])
        rows.append(
            {
                "side": side,
                "steps": len(values),
                "mean ms": round(statistics.fmean(values), 4),
                "p50": round(statistics.median(values), 4),
                "p99": round(values[int(0.99 * (len(values) - 1))], 4),
                "most": round(values[-1], 3),
                "most of it in": f"{call}: {seconds / sum(steps[side].calls_s.values()):.0%}",
            }
        )
    return rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument("--repeats", type=int, help="pairs of turns (7; 3 with --quick)")
    parser.add_argument("--memory-only", action="store_true", help="a cache server without a disk")
    parser.add_argument("--folder", metavar="DIRECTORY", help="where the server's disk is made, and removed again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
