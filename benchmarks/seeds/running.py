"""Runs tables, each run in its own process, and puts each result in its place as soon as it exists."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import missed
from benchmarks.h200 import run_limited
from benchmarks.harness import console, print_table
from benchmarks.seeds.registry import RESULTS, Run, Table, runs_on
from benchmarks.seeds.staleness import age_of

_LINES_OF_A_FAILURE = 25
_LEAST_LIMIT_S = 120.0


@dataclass(frozen=True)
class Done:
    name: str
    seconds: float
    verdict: str


def run_tables(
    tables: list[Table], machine: str, folder: Path, *, minutes: float, is_tiny: bool, only_missing: bool
) -> int:
    """Write results to `folder`. Returns 1 if a run failed or had no time. `only_missing` skips new results."""
    folder.mkdir(parents=True, exist_ok=True)
    done: list[Done] = []
    deadline = time.monotonic() + 60 * minutes
    for table, run in runs_on(machine, tables):
        name = f"{table.name} {run.part}".rstrip()
        if only_missing and any(_is_kept(table.result_of(run, machine, place)) for place in {folder, RESULTS}):
            done.append(Done(name, 0.0, "kept"))
            continue
        left_s = deadline - time.monotonic()
        if not is_tiny and left_s < run.seconds[machine]:
            done.append(Done(name, 0.0, "no time left"))
            continue
        done.append(_run(table, run, machine, folder, name, left_s, is_tiny=is_tiny))
    print_table("runs", [{"table": one.name, "s": round(one.seconds) or "", "": one.verdict} for one in done])
    return 0 if all(one.verdict in ("done", "kept") for one in done) else 1


def _run(table: Table, run: Run, machine: str, folder: Path, name: str, left_s: float, *, is_tiny: bool) -> Done:
    target = table.result_of(run, machine, folder)
    fresh, log = target.with_suffix(".new"), target.with_suffix(".log")
    fresh.unlink(missing_ok=True)
    limit_s = min(left_s, max(_LEAST_LIMIT_S, 2.0 * run.seconds[machine] + 60))
    console.print(f"{name}: about {run.seconds[machine]} s, at most {limit_s:.0f} s")
    started_at = time.monotonic()
    status = run_limited(table.command(run, fresh, is_tiny=is_tiny), log, limit_s)
    seconds = time.monotonic() - started_at
    verdict = _keep(fresh, target, status)
    console.print(f"{name}: {verdict} after {seconds:.0f} s")
    if verdict == "done":
        log.unlink()
    else:
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-_LINES_OF_A_FAILURE:]), markup=False)
    return Done(name, seconds, verdict)


def _keep(fresh: Path, target: Path, status: int | None) -> str:
    """Put a complete result in its place, even if it misses a bar (status 1)."""
    try:
        document = json.loads(fresh.read_text())
    except (OSError, ValueError):
        return "took too long" if status is None else f"failed with status {status}"
    is_whole = status == 0 or (status == 1 and _misses_a_bar(document))
    if is_whole:
        fresh.replace(target)
        return "done"
    fresh.replace(target.with_suffix(".partial"))
    return "took too long" if status is None else f"failed with status {status}"


def _misses_a_bar(document: Mapping[str, Any]) -> bool:
    """Why a benchmark with all of its figures ends with status 1; one that broke off does so as well."""
    figures, bars = document["figures"], document["settings"].get("bars", {})
    return set(bars) <= set(figures) and bool(missed(figures, bars))


def _is_kept(result: Path) -> bool:
    """Whether the result exists and is not older than the code it measures, as far as git knows."""
    return result.exists() and not age_of(result).changes


def missing_results(tables: Sequence[Table], folder: Path = RESULTS) -> list[str]:
    """The missing result files, for the machines that each table needs."""
    return [
        file.name
        for table in tables
        for machine in table.needs
        for file in table.results(machine, folder)
        if not file.exists()
    ]
