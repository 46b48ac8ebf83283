"""A trace of the engine with its copies, for chrome://tracing or Perfetto, and the share of copies beside compute.

On a GPU, copies and kernels are taken from the device's own trace. On a CPU, a copy is a call of the copier on its own
thread, named in the trace, and compute is every step of the engine in which torch works. A result has the spans of
both, for a picture: of the whole trace, and of a piece of it.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import functools
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Result, console, print_figures, print_table
from kvtier.engine.engine import Engine
from kvtier.transfer.copiers.cuda_copier import CudaCopier
from kvtier.transfer.copiers.host_copier import HostCopier

STEP = "kvtier step"
Interval = tuple[float, float]

_JOINED_US = 30.0
"""A picture of the whole trace joins spans with a smaller gap between them."""
_CLOSE_US = 8000.0
_MOST_CLOSE = 2500


def add_trace_option(parser: argparse.ArgumentParser, name: str) -> None:
    target = Path(tempfile.gettempdir()) / f"kvtier_{name}_trace.json"
    parser.add_argument("--trace", metavar="FILE.json", type=Path, default=target, help=f"the trace ({target})")


def trace(act: Callable[[], object], target: Path, device: str) -> list[dict[str, Any]]:
    """Run `act` under torch's profiler, with every copy named. Returns the events; the trace is written to `target`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        _named(HostCopier, "load", _copy_label("load")),
        _named(HostCopier, "store", _copy_label("store")),
        _named(CudaCopier, "load", _copy_label("load")),
        _named(CudaCopier, "store", _copy_label("store")),
        _named(Engine, "step", lambda arguments: STEP),
        torch.profiler.profile(activities=activities, experimental_config=config) as profiler,
    ):
        act()
    profiler.export_chrome_trace(str(target))
    events: list[dict[str, Any]] = json.loads(target.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def report(
    events: Sequence[dict[str, Any]], direction: str, block_bytes: int, device: str, target: Path, result: Result
) -> None:
    """`direction` is load or store. Raises `RuntimeError` when the trace shows no such copy."""
    if device == "cuda":
        word = "HtoD" if direction == "load" else "DtoH"
        copies = [
            event
            for event in events
            if event.get("cat") == "gpu_memcpy"
            and word in event["name"]
            and int(event.get("args", {}).get("bytes", 0)) >= block_bytes // 8
        ]
        compute = [event for event in events if event.get("cat") == "kernel"]
    else:
        copies = [event for event in events if event["name"].startswith(f"kvtier {direction}")]
        compute = _busy_steps(events)
    if not copies or not compute:
        raise RuntimeError(f"the trace shows {len(copies)} copies and {len(compute)} pieces of compute")
    copying, computing = _union(copies), _union(compute)
    copy_us = _length(copying)
    beside = _length(_intersection(copying, computing)) / copy_us
    span = max(end for _, end in computing) - computing[0][0]
    row: dict[str, object] = {
        "copies": len(copies),
        "threads or streams": len({event["tid"] for event in copies}),
        "copying ms": round(copy_us / 1e3, 2),
        "computing ms": round(_length(computing) / 1e3, 2),
        "of ms": round(span / 1e3, 2),
        "copies beside compute": round(beside, 3),
    }
    result.rows.append(row)
    result.rows += timeline_rows(copies, compute)
    result.figures["beside_compute"] = beside
    print_table(f"what the trace shows of every {direction}", [row])
    print_figures(result.figures, {})
    console.print(f"the trace, for chrome://tracing or Perfetto: {target}", soft_wrap=True)


def timeline_rows(copies: Sequence[dict[str, Any]], compute: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """Spans of both in milliseconds since the first: joined for the whole, each for the piece where most overlaps."""
    start = min(float(event["ts"]) for event in (*copies, *compute))
    copying, computing = _joined(_union(copies)), _joined(_union(compute))
    busiest = max(copying, key=lambda span: _length(_intersection([span], computing)))
    first = busiest[0] - _CLOSE_US / 10
    last = first + _CLOSE_US
    rows: list[dict[str, object]] = []
    for lane, events, spans in (("compute", compute, computing), ("copies", copies, copying)):
        each = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events)
        close = [(max(one, first), min(end, last)) for one, end in each if end > first and one < last]
        rows.append({"lane": lane, "ms": _milliseconds(spans, start)})
        rows.append({"lane": f"{lane}, close", "ms": _milliseconds(close[:_MOST_CLOSE], start)})
    return rows


def _joined(spans: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in spans:
        if joined and start - joined[-1][1] < _JOINED_US:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _milliseconds(spans: Sequence[Interval], since: float) -> list[list[float]]:
    return [[round((start - since) / 1e3, 4), round((end - since) / 1e3, 4)] for start, end in spans]


@contextlib.contextmanager
def _named(kind: type, name: str, label: Callable[[Sequence[Any]], str]) -> Iterator[None]:
    """Show calls of the method in the trace, under a `label` made of their arguments."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def named(self: object, *arguments: Any, **others: Any) -> Any:
        with torch.profiler.record_function(label(arguments)):
            return method(self, *arguments, **others)

    setattr(kind, name, named)
    try:
        yield
    finally:
        setattr(kind, name, method)


def _copy_label(name: str) -> Callable[[Sequence[Any]], str]:
    def label(arguments: Sequence[Any]) -> str:
        num_blocks = next(len(one) for one in arguments if isinstance(one, Sequence))
        return f"kvtier {name}: {num_blocks} blocks, {threading.current_thread().name}"

    return label


def _busy_steps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The engine's steps that did more than wait."""
    steps = [event for event in events if event["name"] == STEP]
    starts = sorted(float(event["ts"]) for event in events if event.get("cat") == "cpu_op")
    return [
        step
        for step in steps
        if bisect.bisect_left(starts, float(step["ts"])) < bisect.bisect_right(starts, float(step["ts"]) + step["dur"])
    ]


def _union(events: Sequence[dict[str, Any]]) -> list[Interval]:
    """Without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)
