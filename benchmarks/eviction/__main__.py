"""The hits of eviction policies on recorded traffic: the share of prompt tokens that hit, by cache size.

    python -m benchmarks.eviction [--quick] [--json FILE] [--traces FOLDER] [--trace NAME] [--sizes 1000,2000]

`--jobs` replays run at the same time, by default as many as there are cores. LRU and ours, the adaptive policy, run in
the real pool; S3-FIFO, ARC and a clairvoyant cache are plain ones (`baselines`). Hits are the leading resident blocks
of 512 tokens, at most the prompt's tokens, over all prompt tokens. Beside the recorded traces there are some that are
made up here (`synthetic`); `--quick` has those alone, shorter ones. One more (`held_out`) was hardly used for choices
of the policy. `agentic_N` is ours on the agents' trace with N blocks, `lru_off` the largest difference between our LRU
and what another program measured on the same trace. `--peers` takes the other policies' rates, which are always the
same, from an earlier result. Ends with status 1 when a figure misses its bar. No figure depends
on how fast or busy the machine is.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.eviction.baselines import Arc, Clairvoyant, S3Fifo, hit_rate
from benchmarks.eviction.held_out import held_out_trace
from benchmarks.eviction.synthetic import synthetic_traces
from benchmarks.harness import Result, console, finish, make_parser, print_table, read_options
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.simulate.replay import replay
from kvtier.simulate.trace import TracedRequest, by_arrival, read_traces

SIZES = [500 << power for power in range(8)]
QUICK_SIZES = [250, 500, 1000]
QUICK_REQUESTS = 300
MADE_UP = "made"
HELD_OUT = "held_out"
TRACES = {
    "agentic": "agentic_100.jsonl.gz",
    "mooncake_conversation": "mooncake_conversation_trace.jsonl",
    "mooncake_synthetic": "mooncake_synthetic_trace.jsonl",
}
KNOWN_LRU = {1000: 0.178, 2000: 0.451, 4000: 0.789, 8000: 0.914}
"""LRU's hits on the agents' trace, as another program measured them."""
BARS = {
    "agentic_1000": ">= 0.36",
    "agentic_2000": ">= 0.57",
    "worst_below_lru": "<= 0.005",
    "worst_below_arc_mooncake": "<= 0.005",
    "lru_off": "<= 0.002",
}
OURS = "ours"
Requests = Sequence[TracedRequest]
Tables = dict[str, dict[str, list[float]]]
"""Hit rates by trace, policy and size."""


def _replayed(requests: Requests, size: int, eviction: Eviction) -> float:
    return replay(requests, size, lambda clock: eviction_policy(eviction, declines=True, clock=clock)).hit_rate


POLICIES: dict[str, Callable[[Requests, int], float]] = {
    "LRU": lambda requests, size: _replayed(requests, size, "lru"),
    "S3-FIFO": lambda requests, size: hit_rate(requests, S3Fifo(size)),
    "ARC": lambda requests, size: hit_rate(requests, Arc(size)),
    OURS: lambda requests, size: _replayed(requests, size, "adaptive"),
    "clairvoyant": lambda requests, size: hit_rate(requests, Clairvoyant(requests, size)),
}


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="where recorded traces are")
    parser.add_argument("--trace", action="append", choices=(*TRACES, MADE_UP, HELD_OUT), help="only this one")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="replays at the same time  [default: cores]")
    parser.add_argument("--peers", type=Path, help="an earlier result: only ours is replayed where that has the others")
    options, arguments = read_options(parser, ())
    sizes = arguments.sizes or (QUICK_SIZES if options.quick else SIZES)
    names = arguments.trace or ((MADE_UP,) if options.quick else (*TRACES, MADE_UP, HELD_OUT))
    tables: Tables = {}
    result = Result("eviction", {"sizes": sizes, "traces": list(names)})
    known = _known(arguments.peers)
    with ProcessPoolExecutor(arguments.jobs) as jobs:
        for name in names:
            for each, requests in _traces(name, arguments.traces, is_quick=options.quick).items():
                tables[each] = {}
                for policy in POLICIES:
                    rates = [known.get((each, size, policy)) for size in sizes]
                    if policy == OURS or None in rates:
                        rates = list(jobs.map(functools.partial(_rate, policy, requests), sizes))
                    tables[each][policy] = [rate for rate in rates if rate is not None]
                result.rows += _rows(each, tables[each], sizes)
                console.print(f"{each}: done")
    print_table("share of prompt tokens that hit", result.rows)
    result.figures = _figures(tables, sizes)
    is_all = not (options.quick or arguments.trace or arguments.sizes)
    return finish(result, BARS if is_all else {bar: BARS[bar] for bar in BARS if bar in result.figures}, options.json)


def _known(earlier: Path | None) -> dict[tuple[str, int, str], float | None]:
    """The rates in an earlier result, by trace, size and policy."""
    rows = [] if earlier is None else json.loads(earlier.read_text())["rows"]
    return {(row["trace"], row["blocks"], policy): float(row[policy]) for row in rows for policy in POLICIES}


def _rate(policy: str, requests: Requests, size: int) -> float:
    return POLICIES[policy](requests, size)


def _traces(name: str, folder: Path, *, is_quick: bool) -> dict[str, list[TracedRequest]]:
    if name == HELD_OUT:
        return {name: held_out_trace()}
    if name != MADE_UP:
        return {name: by_arrival(read_traces(folder / TRACES[name]))}
    return synthetic_traces(QUICK_REQUESTS) if is_quick else synthetic_traces()


def _rows(trace: str, rates: dict[str, list[float]], sizes: Sequence[int]) -> list[dict[str, object]]:
    return [
        {"trace": trace, "blocks": size, **{policy: f"{rates[policy][place]:.4f}" for policy in POLICIES}}
        for place, size in enumerate(sizes)
    ]


def _figures(tables: Tables, sizes: Sequence[int]) -> dict[str, float]:
    figures = {"worst_below_lru": _worst_below("LRU", tables.values())}
    if HELD_OUT in tables:
        figures["held_out_below_lru"] = _worst_below("LRU", [tables[HELD_OUT]])
        figures["held_out_below_arc"] = _worst_below("ARC", [tables[HELD_OUT]])
    recorded = [table for name, table in tables.items() if name.startswith("mooncake")]
    if recorded:
        figures["worst_below_arc_mooncake"] = _worst_below("ARC", recorded)
    if agentic := tables.get("agentic"):
        figures |= {f"agentic_{size}": rate for size, rate in zip(sizes, agentic["ours"], strict=True)}
        off = [
            abs(rate - KNOWN_LRU[size]) for size, rate in zip(sizes, agentic["LRU"], strict=True) if size in KNOWN_LRU
        ]
        if off:
            figures["lru_off"] = max(off)
    return figures


def _worst_below(peer: str, tables: Iterable[dict[str, list[float]]]) -> float:
    """The largest deficit of ours against another policy, over sizes and traces."""
    return max(theirs - ours for table in tables for theirs, ours in zip(table[peer], table["ours"], strict=True))


if __name__ == "__main__":
    sys.exit(main())
