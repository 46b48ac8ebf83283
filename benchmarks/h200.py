"""All figures that are measured on an H200, the most important first.

    python -m benchmarks.h200 [--minutes N] [--out FOLDER] [PART ...]
    python -m benchmarks.h200 --list

Each part is a benchmark in its own process, with its own time limit. Its result and output are in FOLDER as soon as it
ends; the next part runs even if one fails or takes too long. With `--minutes`, parts that would probably not end in
time are not started. At the end a table shows all figures that have a bar; the exit status is 1 if one misses it.
`--tiny` runs everything in a small size on a CPU, to show that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bars import missed
from benchmarks.harness import console, print_table

_LONG_TINY = ("--prompts", "2", "--input-tokens", "72", "--always-load")
_SHAPE = ("--model-shape", "Qwen2.5-7B")
_STEPS = ("--max-num-batched-tokens", "8192")
_STORE = (*_SHAPE, "--managers", "prefix_caching", "--prompts", "2", "--most-steps", "64", "--pairs", "5")
_STORE_TINY = ("--prompts", "2", "--input-tokens", "72", "--pairs", "1", "--turns", "1", "--batched-tokens", "64")
_GRACE_S = 20.0
_LINES_OF_A_FAILURE = 25


@dataclass(frozen=True)
class Part:
    """A benchmark. `arguments` are for the H200, where it takes about `expected_s`; `tiny` are for a CPU.

    `also` are figures without a bar that the table shows.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    tiny: tuple[str, ...]
    expected_s: int
    also: tuple[str, ...] = ()

    @property
    def limit_s(self) -> int:
        """Twice the expected time, plus time to compile kernels. A part that takes longer has failed."""
        return 2 * self.expected_s + 60

    def command(self, target: Path, *, is_tiny: bool) -> list[str]:
        arguments = ("--quick", "--device", "cpu", *self.tiny) if is_tiny else self.arguments
        return [sys.executable, "-m", f"benchmarks.{self.module}", *arguments, "--json", str(target)]


PARTS = (
    Part(
        "long",
        "prefix_caching.test_long_prefill",
        ("--quick", *_STEPS),
        ("--prompts", "2"),
        80,
        ("decode_of_limit", "decode_mixed_of_limit"),
    ),
    Part(
        "copies",
        "offloading_KV_cache.baseline.test_copies",
        ("--quick",),
        ("--blocks", "32", "--input-tokens", "256", "--repeats", "1"),
        45,
    ),
    Part(
        "host",
        "offloading_KV_cache.test_long_prefill",
        ("--quick", *_STEPS),
        (*_LONG_TINY, "--outputs", "2", "--ttft-tokens", "200"),
        90,
    ),
    Part(
        "restart",
        "remote_kv_cache.test_restart",
        ("--quick",),
        (*_LONG_TINY, "--repeats", "1"),
        170,
        ("server_hit_n2", "tcp_hit_n2", "tcp_gbs", "tcp_of_raw_socket", "disk_gbs", "disk_raw_gbs"),
    ),
    Part(
        "sweep",
        "prefix_caching.baseline",
        ("--parts", "sweep", *_SHAPE, *_STEPS),
        ("--parts", "schedule", "table", "--hit-rates", "50", "--prompts", "2", "--few", "2"),
        100,
    ),
    Part(
        "beside",
        "remote_kv_cache.test_decode_beside_load",
        ("--quick",),
        ("--prompts", "2", "--input-tokens", "40", "--long-tokens", "200", "--window", "24", "--repeats", "1"),
        75,
        ("decode_p99_growth_copies", "decode_p50_growth"),
    ),
    Part(
        "quantized",
        "prefix_caching.test_quantized",
        ("--quick",),
        ("--input-tokens", "64", "--output-tokens", "4", "--repeats", "1"),
        80,
        ("gptq_prefill_x", "fp8_decode_x_16", "gptq_decode_x_16"),
    ),
    Part(
        "json-schema",
        "structured.test_json_schema",
        ("--quick",),
        ("--prompts", "2", "--input-tokens", "16", "--output-tokens", "8", "--repeats", "1"),
        75,
        ("json_schema_drawn_x",),
    ),
    Part(
        "swap-in",
        "offloading_KV_cache.test_swap_in",
        ("--quick", *_SHAPE, *_STEPS),
        (*_LONG_TINY, "--output-tokens", "2", "--hit-rates", "50", "80", "--repeats", "1"),
        115,
        ("host_over_device_50", "host_over_device_90", "host_over_device_100", "parts_at"),
    ),
    Part(
        "agents",
        "eviction.replayed",
        (),
        ("--requests", "12", "--tokens", "16", "--start", "0"),
        420,
        ("hits_adaptive",),
    ),
    Part("swap-out", "offloading_KV_cache.test_swap_out", _STORE, _STORE_TINY, 120),
    Part("transfer-out", "remote_kv_cache.test_transfer_out", _STORE, _STORE_TINY, 125),
    Part(
        "pairs",
        "prefix_caching.baseline",
        ("--quick", "--parts", "pairs", "schedule", *_SHAPE, *_STEPS),
        ("--parts", "pairs", "--few", "2", "--pairs", "1"),
        75,
        ("async2_over_sync_min",),
    ),
)


@dataclass
class Outcome:
    """The outcome of a part. `status` is its exit status, or None if it had to be ended."""

    part: Part
    seconds: float
    status: int | None
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        return dict(self.document.get("figures", {}))

    @property
    def bars(self) -> dict[str, str]:
        return dict(self.document.get("settings", {}).get("bars", {}))

    @property
    def verdict(self) -> str:
        if self.status is None:
            return "took too long"
        if not self.document or self.status not in (0, 1) or (self.status == 1 and not missed(self.figures, self.bars)):
            return f"failed with status {self.status}"
        return "misses a bar" if self.status else "good"


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    arguments = _parse(argv, parts)
    chosen = [part for part in parts if part.name in arguments.parts] if arguments.parts else list(parts)
    if arguments.list:
        for part in chosen:
            print(f"{part.name:14} {part.expected_s:4} s  {shlex.join(part.command(Path('FILE'), is_tiny=False)[1:])}")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    left_out: list[str] = []
    deadline = time.monotonic() + 60 * arguments.minutes
    for part in chosen:
        left_s = deadline - time.monotonic()
        if left_s < part.expected_s and not arguments.tiny:
            left_out.append(part.name)
            continue
        outcomes.append(run_part(part, arguments.out, min(part.limit_s, left_s), is_tiny=arguments.tiny))
    rows = [{"part": one.part.name, "s": round(one.seconds), "": one.verdict} for one in outcomes]
    print_table("parts", [*rows, *({"part": name, "s": "", "": "no time left"} for name in left_out)])
    print_table("figures", [row for one in outcomes for row in figure_rows(one)])
    return 0 if all(one.verdict == "good" for one in outcomes) and not left_out else 1


def run_part(part: Part, folder: Path, limit_s: float, *, is_tiny: bool) -> Outcome:
    """Run a part. Afterwards its result and output are in `folder`, as far as it came."""
    stem = f"h200_{part.name.replace('-', '_')}"
    target, log = folder / f"{stem}.json", folder / f"{stem}.log"
    target.unlink(missing_ok=True)
    console.print(f"{part.name}: about {part.expected_s} s, at most {limit_s:.0f} s")
    started_at = time.monotonic()
    status = run_limited(part.command(target, is_tiny=is_tiny), log, limit_s)
    outcome = Outcome(part, time.monotonic() - started_at, status, _read(target))
    console.print(f"{part.name}: {outcome.verdict} after {outcome.seconds:.0f} s")
    if outcome.verdict not in ("good", "misses a bar"):
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-_LINES_OF_A_FAILURE:]), markup=False)
    return outcome


def run_limited(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command with its output in `log`. Returns its exit status; None if it and its children had to be ended."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        return _wait(process, limit_s)


def figure_rows(outcome: Outcome) -> Iterator[dict[str, object]]:
    """All figures with a bar, measured or not, and those that the part names."""
    figures, bars = outcome.figures, outcome.bars
    late = set(missed(figures, bars))
    for name in (*bars, *(name for name in outcome.part.also if name in figures and name not in bars)):
        value = f"{figures[name]:.4g}" if name in figures else "absent"
        met = "" if name not in bars else "NO" if name in late else "yes"
        yield {"figure": name, "value": value, "bar": bars.get(name, ""), "met": met, "part": outcome.part.name}


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status; None if it had to be ended. It gets a signal first, so that it can write its results."""
    try:
        return process.wait(max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    except BaseException:
        _kill_session(process)
        raise
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:
        _kill_session(process)
    return None


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """The process and the servers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(target: Path) -> Mapping[str, Any]:
    try:
        document: Mapping[str, Any] = json.loads(target.read_text())
    except (OSError, ValueError):
        return {}
    return document


def _parse(argv: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in parts]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long all may take")
    parser.add_argument("--out", type=Path, default=Path("h200-results"), metavar="FOLDER", help="where results go")
    parser.add_argument("--list", action="store_true", help="show the parts, their commands and what they take")
    parser.add_argument("--tiny", action="store_true", help="a small size on a CPU")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.parts) - set(names))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(names)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
