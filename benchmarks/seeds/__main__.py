"""Every table and picture of the documents the project comes from, by one command.

    python -m benchmarks.seeds --list                              # each with its result file, its commit, its age
    python -m benchmarks.seeds run NAME ...                        # measure, on the machine that this is
    python -m benchmarks.seeds run --machine gpu --minutes 9.5     # what is missing or old, the most important first
    python -m benchmarks.seeds draw                                # pictures from the results
    python -m benchmarks.seeds page [--check]                      # docs/seeds.md from the results

A result is written as soon as its run ends, to `benchmarks/results/seeds/` or to `--out`. With `--minutes`, runs that
would probably not end in time are not started. `--tiny` runs everything in a small size on a CPU, to show that it
works. `--list --all` also lists the project's other results, and marks those older than the code they measure.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.seeds.page import PAGE, make_page
from benchmarks.seeds.registry import CPU, GPU, MACHINES, RESULTS, Table, tables_of
from benchmarks.seeds.running import missing_results, run_tables
from benchmarks.seeds.staleness import age_of, ages


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        tables = tables_of(getattr(arguments, "names", []))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    match arguments.act:
        case "run":
            return run_tables(
                tables,
                arguments.machine or _this_machine(),
                arguments.out,
                minutes=arguments.minutes,
                is_tiny=arguments.tiny,
                only_missing=not arguments.names and not arguments.again and not arguments.tiny,
            )
        case "draw":
            return _draw(tables, arguments.out)
        case "page":
            return _page(arguments.out, is_check=arguments.check)
    return _list(tables, is_all=arguments.all)


def _list(tables: Sequence[Table], *, is_all: bool) -> int:
    """Never fails: old results are only listed."""
    for table in tables:
        for machine in MACHINES:
            for run, file in zip(table.runs, table.results(machine), strict=True):
                if machine not in run.seconds:
                    continue
                if file.exists():
                    age = age_of(file)
                    state = f"{age.commit}, {age.at[:16]}, {age.sentence}"
                elif machine in table.needs:
                    state = "not run yet"
                else:
                    continue
                where = file.relative_to(RESULTS.parents[2])
                print(f"{table.name:22} {machine}  {run.seconds[machine]:4} s  {where}: {state}")
    if is_all:
        kept = {file for table in tables for machine in MACHINES for file in table.results(machine)}
        for age in ages(RESULTS.parent):
            if age.file not in kept:
                print(f"{age.file.relative_to(RESULTS.parents[2])}: {age.commit}, {age.at[:16]}, {age.sentence}")
    for machine in MACHINES:
        absent = [one for one in missing_results(tables) if one.startswith(MACHINES[machine])]
        print(f"{machine}: {len(absent)} results are missing", file=sys.stderr)
    return 0


def _draw(tables: Sequence[Table], folder: Path) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        print("error: pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    from benchmarks.seeds.drawing import draw_table  # noqa: PLC0415

    for table in tables:
        for target in draw_table(table, folder):
            print(target)
    return 0


def _page(folder: Path, *, is_check: bool) -> int:
    text = make_page(folder)
    if is_check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE.name} is not what the results make: python -m benchmarks.seeds page", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def _this_machine() -> str:
    if importlib.util.find_spec("torch") is None:
        return CPU
    import torch  # noqa: PLC0415

    return GPU if torch.cuda.is_available() else CPU


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the tables, their results, and how old those are")
    parser.add_argument("--all", action="store_true", help="with --list: the project's other results, too")
    acts = parser.add_subparsers(dest="act")
    run = acts.add_parser("run", help="measure tables")
    run.add_argument("names", nargs="*", metavar="NAME", help="default: all that are missing or old")
    run.add_argument("--machine", choices=tuple(MACHINES), help="what this machine is, unless it is seen")
    run.add_argument("--minutes", type=float, default=600.0, help="how long all may take")
    run.add_argument("--again", action="store_true", help="also what is kept and new")
    run.add_argument("--tiny", action="store_true", help="a small size on a CPU")
    draw = acts.add_parser("draw", help="draw pictures from results")
    draw.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    page = acts.add_parser("page", help="write docs/seeds.md from results")
    page.add_argument("--check", action="store_true", help="only say whether it is what the results make")
    for one in (run, draw, page):
        one.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results are")
    arguments = parser.parse_args(argv)
    if arguments.act is None and not arguments.list:
        parser.error("say --list, run, draw or page")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
