"""The time of a hit inside vLLM: the work of the engine and the plug-in, in order.

    python -m benchmarks.vllm.timeline [--small] [--whole-prompts] [--repeats N] [--json FILE]

For a prompt of 30,000 tokens and for ten of 10,240 at once, from vLLM's own cache, after a reset of it, and in a new
engine: the run of median length, as lines with beginnings and ends, in milliseconds. It compares nothing;
`benchmarks.vllm.test_gpu` does. `--small` is for trying this program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, console
from benchmarks.vllm.quiet import wait_until_quiet
from benchmarks.vllm.stand import VllmEngine
from benchmarks.vllm.test_gpu import TINY, WHOLE, GpuStand
from benchmarks.vllm.timeline_connector import FILE_VARIABLE
from kvtier.testing.servers import ServerProcess

_MERGED_MS = 0.05
"""Shorter work is not printed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One question, from its arrival to its answer."""

    name: str
    began_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model on a CPU")
    parser.add_argument("--whole-prompts", action="store_true", help="with the plug-in's setting of this name")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="how often each question is asked")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all that was noted goes")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvtier-timeline-") as folder:
        stand = GpuStand(
            TINY if options.small else WHOLE,
            Path(folder),
            Result("vllm.timeline", {}),
            whole_prompts=options.whole_prompts,
        )
        lines = _measure(stand, options.repeats)
    if options.json is not None:
        options.json.write_text(json.dumps(lines))
    for name, title in lines.items():
        console.rule(name)
        console.print("\n".join(title), markup=False, highlight=False)
    return 0


def _measure(stand: GpuStand, repeats: int) -> dict[str, list[str]]:
    folder = stand.folder
    long, many = stand.long_prompt("timeline"), stand.mid_prompts("timeline")
    lines: dict[str, list[str]] = {}
    with stand.server() as server:
        with _noting_engine(stand, server, folder / "first.json") as (one, runs):
            one.ask(long, num_tokens=2)
            one.ask_all(many, num_tokens=2)
            asks: dict[str, Callable[[], object]] = {
                "one prompt": lambda: one.ask(long, num_tokens=1),
                "ten prompts": lambda: one.ask_all(many, num_tokens=2),
            }
            for what, ask in asks.items():
                ask()
                for _ in range(repeats):
                    wait_until_quiet()
                    runs.append(_timed(f"{what}, vLLM's own hit", ask))
                for _ in range(repeats):
                    wait_until_quiet()
                    one.forget_prefixes()
                    runs.append(_timed(f"{what}, after a reset", ask))
        lines |= _lines_of(runs, folder / "first.json")
        with _noting_engine(stand, server, folder / "second.json") as (two, runs):
            for _ in range(repeats):
                wait_until_quiet()
                two.forget_prefixes()
                runs.append(_timed("one prompt, in a new engine", lambda: two.ask(long, num_tokens=1)))
        lines |= _lines_of(runs, folder / "second.json")
    return lines


@contextmanager
def _noting_engine(stand: GpuStand, server: ServerProcess, file: Path) -> Iterator[tuple[VllmEngine, list[Run]]]:
    os.environ[FILE_VARIABLE] = str(file)
    with stand.engine(server, connector=("TimelineConnector", "benchmarks.vllm.timeline_connector")) as one:
        yield one, []


def _timed(name: str, ask: Callable[[], object]) -> Run:
    began_at = time.monotonic()
    ask()
    return Run(name, began_at, time.monotonic())


def _lines_of(runs: Sequence[Run], file: Path) -> dict[str, list[str]]:
    """The run of median length of each name."""
    noted = json.loads(file.read_text())
    lines = {}
    for name in dict.fromkeys(run.name for run in runs):
        same = sorted((run for run in runs if run.name == name), key=lambda run: run.seconds)
        median = same[len(same) // 2]
        lengths = ", ".join(f"{1000 * run.seconds:.1f}" for run in same)
        lines[name] = [f"all runs: {lengths} ms", *_told(median, noted)]
    return lines


def _told(run: Run, noted: Sequence[tuple[float, float, str]]) -> list[str]:
    told = []
    for began_at, ended_at, what in noted:
        if run.began_at <= began_at <= run.ended_at and 1000 * (ended_at - began_at) >= _MERGED_MS:
            first, last = (1000 * (moment - run.began_at) for moment in (began_at, ended_at))
            told.append(f"{first:8.2f} {last:8.2f}  {last - first:7.2f}  {what}")
    return told


if __name__ == "__main__":
    sys.exit(main())
