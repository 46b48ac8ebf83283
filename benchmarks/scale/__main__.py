"""10 to 1,000 hosts over one Valkey cluster, simulated: what fails first, and which settings follow.

    python -m benchmarks.scale [--quick] [--json FILE] [--plot FILE.png] [--only NAME ...]

Hot system prompts, a shard lost and refilled, resharding, a cold start of everything, slow networks. Nothing is
measured here: a virtual clock runs the cost model of `benchmarks/scale/costs.py` over kvtier's own placement of blocks.
Status 1 when a figure misses its bar. docs/design/scale.md says what follows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Result, console, finish, make_parser, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.scale.costs import Costs
from benchmarks.scale.scenarios import FULL, QUICK, SCENARIOS, Table

BARS = {
    "usable_prefixes_shard_lost": ">= 0.65",
    "usable_prefixes_without_segments": "<= 0.02",
    "hot_own_memory_x": "<= 2",
    "hot_decides_x": "<= 4",
    "slow_network_p99_x": "<= 2",
    "lost_missing": "<= 0.25",
    "refilled_missing": "<= 0.05",
    "reshard_p99_x": "<= 1.5",
    "herd_stored_claim_x": "<= 1.5",
    "routed_p99_x": "<= 0.8",
}


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    names = [scenario.__name__ for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="+", choices=names, help="these questions; no bars")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw TTFT over hosts (needs matplotlib)")
    arguments = parser.parse_args(words)
    size = QUICK if arguments.quick else FULL
    result = Result("scale", {"quick": arguments.quick, "size": asdict(size), "costs": asdict(Costs())})
    for scenario in SCENARIOS:
        if arguments.only and scenario.__name__ not in arguments.only:
            continue
        began_at = time.perf_counter()
        table = scenario(size)
        print_table(f"{table.title} ({time.perf_counter() - began_at:.1f} s to simulate)", table.rows)
        result.rows += [{"table": table.name, **row} for row in table.rows]
        result.figures.update(table.figures)
        if arguments.plot and table.name == "hot":
            _plot(table, arguments.plot)
    return finish(result, {} if arguments.only else BARS, arguments.json)


def _plot(table: Table, target: Path) -> None:
    lines: dict[str, dict[float, float]] = {}
    for row in table.rows:
        points = lines.setdefault(str(row["way"]), {})
        points[float(str(row["hosts"]))] = min(float(str(row["p99, ms"])), 2000.0)
    title = "8,192 tokens of a hot system prompt, 64 shards, 25 GbE (2,000 ms and more drawn as 2,000)"
    draw_lines(lines, target, title=title, x_label="hosts", y_label="TTFT p99, ms", has_log_x=True)
    console.print(f"drawn: {target}")


if __name__ == "__main__":
    sys.exit(main())
