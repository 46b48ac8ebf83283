"""Shared by all benchmarks: options, medians of interleaved repeats, tables and JSON files.

Machines are noisy, so the things compared take turns within one run: each repeat runs all of them once, and the
medians over the repeats are compared.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bars import is_met, missed
from benchmarks.shapes import SHAPES
from kvtier.memory.copying import address_of

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
"""Progress and tables. Standard output is for `--json -` alone."""


@dataclass(frozen=True)
class Options:
    """The parsed command line. `shapes` are the shapes to measure."""

    quick: bool
    json: str | None
    repeats: int
    shapes: tuple[str, ...]


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and shapes; about a minute")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument("--repeats", type=int, help="how often each thing is measured (5; 3 with --quick)")
    parser.add_argument("--model-shape", action="append", choices=tuple(SHAPES), help="measure this shape only")
    return parser


def read_options(
    parser: argparse.ArgumentParser, shapes: Sequence[str], quick_shapes: Sequence[str] = ("Qwen2.5-7B",)
) -> tuple[Options, argparse.Namespace]:
    arguments = parser.parse_args()
    chosen = arguments.model_shape or (quick_shapes if arguments.quick else shapes)
    repeats = arguments.repeats or (3 if arguments.quick else 5)
    return Options(arguments.quick, arguments.json, repeats, tuple(chosen)), arguments


def parse_options(description: str, shapes: Sequence[str]) -> Options:
    return read_options(make_parser(description), shapes)[0]


@dataclass
class Result:
    """Rows for readers, figures to follow over time."""

    benchmark: str
    settings: Mapping[str, object]
    rows: list[dict[str, object]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def write(self, target: str | None) -> None:
        document = {
            "benchmark": self.benchmark,
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "machine": machine(),
            "settings": dict(self.settings),
            "rows": self.rows,
            "figures": {name: round(value, 4) for name, value in self.figures.items()},
        }
        if target == "-":
            json.dump(document, sys.stdout, indent=1)
            print()
        elif target:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(json.dumps(document, indent=1) + "\n")


@dataclass(frozen=True)
class Contender:
    """One thing to time. `prepare` runs before each repeat and `check` after it, both outside the clock."""

    name: str
    act: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], object] = lambda: None


def race(contenders: Sequence[Contender], repeats: int) -> dict[str, float]:
    """Median seconds of each. They take turns, after one untimed turn each."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats + 1):
        for contender in contenders:
            contender.prepare()
            started_at = time.perf_counter()
            contender.act()
            elapsed = time.perf_counter() - started_at
            contender.check()
            if repeat:
                seconds[contender.name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds.items()}


class BlockMemory:
    """`num_blocks` blocks side by side, resident. `blocks[i]` is a view of one."""

    def __init__(self, num_blocks: int, block_bytes: int, seed: int | None = None) -> None:
        """With `seed`, the bytes are random, and every block begins and ends differently."""
        self.nbytes = num_blocks * block_bytes
        self.memory = mmap.mmap(-1, self.nbytes)
        self.view = memoryview(self.memory)
        self.blocks = [self.view[i * block_bytes : (i + 1) * block_bytes] for i in range(num_blocks)]
        if seed is None:
            self.poison()
        else:
            dice = random.Random(seed)
            common = dice.randbytes(block_bytes)
            own_bytes = min(256, block_bytes // 2)
            for block in self.blocks:
                block[:] = common
                block[:own_bytes] = dice.randbytes(own_bytes)
                block[-own_bytes:] = dice.randbytes(own_bytes)

    def poison(self) -> None:
        """Fill with bytes that no payload has at that place, so that a missing write is noticed."""
        filler = b"\xa5" * (1 << 20)
        for start in range(0, self.nbytes, len(filler)):
            end = min(start + len(filler), self.nbytes)
            self.view[start:end] = filler[: end - start]

    def expect(self, other: BlockMemory) -> None:
        expect_same(self.view, other.view)


def expect_same(found: memoryview, expected: memoryview) -> None:
    """Compares with memcmp: `==` of memoryviews takes a nanosecond a byte."""
    if len(found) != len(expected) or _memcmp(address_of(found), address_of(expected), len(found)):
        raise AssertionError("the bytes that came back are not those that were stored")


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(name, "")) for name in names))
    console.print(table)


def print_figures(figures: Mapping[str, float], bars: Mapping[str, str]) -> None:
    """Figures and their `bars`, texts like "<= 1.15". A figure that was not measured misses its bar."""
    rows = []
    for name, value in figures.items():
        bar = bars.get(name, "")
        met = "" if not bar else "yes" if is_met(value, bar) else "NO"
        rows.append({"figure": name, "value": f"{value:.3f}", "bar": bar, "met": met})
    rows += [
        {"figure": name, "value": "absent", "bar": bar, "met": "NO"}
        for name, bar in bars.items()
        if name not in figures
    ]
    print_table("figures", rows)


def finish(result: Result, bars: Mapping[str, str], json_file: str | None) -> int:
    """Show the figures and write the result. Returns the exit status: 1 if a figure misses its bar."""
    result.settings = {**result.settings, "bars": dict(bars)}
    print_figures(result.figures, bars)
    result.write(json_file)
    return 1 if missed(result.figures, bars) else 0


def machine() -> dict[str, object]:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("model name", "cpu part")):
            model = line.split(":", 1)[1].strip()
            break
    with open("/proc/meminfo") as file:
        memory_kib = int(file.readline().split()[1])
    return {
        "cpu": model,
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "linux": platform.release(),
        "python": platform.python_version(),
    }


def _commit() -> str:
    """The repository's commit, or `KVTIER_COMMIT` for a copy of the files without their history."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KVTIER_COMMIT") or "unknown"


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
