"""Draws the documents' pictures from results. Needs matplotlib and no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.line_plot import Lines, draw_lines
from benchmarks.prefix_caching import plot as prefix_plot
from benchmarks.seeds.registry import GPU, RESULTS, Table
from examples.use_remote_KV_cache import plot as stress_plot

Document = Mapping[str, Any]
Draw = Callable[[Sequence[Document], Path], None]

_DPI = 100
_COLOURS = {"compute": "#b0483a", "copies": "#35527e"}
_X_LABEL = "share of the prompt that is a common prefix, %"
_Y_LABEL = "requests per second"


def draw_table(table: Table, folder: Path = RESULTS) -> list[Path]:
    """Draw all pictures of a table, if it has results."""
    documents = [json.loads(file.read_text()) for file in table.results(GPU, folder) if file.exists()]
    drawn = []
    for name in table.pictures if documents else ():
        target = table.picture(name, folder)
        DRAWINGS[name](documents, target)
        drawn.append(target)
    return drawn


def _rows(documents: Sequence[Document]) -> list[Mapping[str, Any]]:
    return [row for document in documents for row in document["rows"]]


def _title(document: Document, what: str) -> str:
    settings = document["settings"]
    return f"{settings['shape']} on {settings['device']}: {what}"


def _draw_lines(lines: Lines, target: Path, title: str, is_dashed: Callable[[str], bool]) -> None:
    draw_lines(
        lines,
        target,
        title=title,
        x_label=_X_LABEL,
        y_label=_Y_LABEL,
        style_of=lambda name: {"linestyle": "--" if is_dashed(name) else "-"},
        dpi=_DPI,
    )


def _transfer_in(state: str) -> Draw:
    def draw(documents: Sequence[Document], target: Path) -> None:
        lines: dict[str, dict[float, float]] = {}
        for row in _rows(documents):
            for column in ("first", "second"):
                lines.setdefault(f"{column} run", {})[float(row["hit %"])] = float(row[f"{column} QPS"])
        title = _title(documents[0], f"before and after a restart, GPU cache {state}")
        _draw_lines(lines, target, title, lambda name: name.startswith("first"))

    return draw


def _swap_in(documents: Sequence[Document], target: Path) -> None:
    lines: dict[str, dict[float, float]] = {}
    for row in _rows(documents):
        for name in ("no cache", "device hit", "host hit, device cache on", "host hit, device cache off"):
            if name in row:
                lines.setdefault(name, {})[float(row["hit %"])] = float(row[name])
    _draw_lines(lines, target, _title(documents[0], "where the prefix lies"), lambda name: name == "no cache")


def _baseline(documents: Sequence[Document], target: Path) -> None:
    prefix_plot.draw(_rows(documents), documents[0]["settings"], target, dpi=_DPI)


def _stress(documents: Sequence[Document], target: Path) -> None:
    stress_plot.draw(documents[0], target, dpi=_DPI)


def _triangle(documents: Sequence[Document], target: Path) -> None:
    """A cell for each request, dark where it took long."""
    rows = _rows(documents)
    count = max(int(row["round"]) for row in rows)
    cells = [[float("nan")] * count for _ in range(count)]
    for row in rows:
        cells[int(row["round"]) - 1][int(row["document"]) - 1] = float(row["ttft_s"])
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells, norm="log", cmap="YlOrBr")
    for y, line in enumerate(cells):
        for x, seconds in enumerate(line[: y + 1]):
            axes.text(x, y, f"{seconds:.2f}", ha="center", va="center", color="black", fontsize=9)
    axes.set_xticks(range(count), [str(number) for number in range(1, count + 1)])
    axes.set_yticks(range(count), [str(number) for number in range(1, count + 1)])
    axes.set_xlabel("document")
    axes.set_ylabel("round")
    axes.set_title(f"Seconds to the first token, {documents[0]['settings']['prompt_tokens']:,} tokens", fontsize=10)
    figure.colorbar(image, ax=axes, label="seconds")
    figure.savefig(target, dpi=_DPI)


def _timeline(what: str, *, is_close: bool = False) -> Draw:
    def draw(documents: Sequence[Document], target: Path) -> None:
        end = ", close" if is_close else ""
        found = [row for row in _rows(documents) if "lane" in row]
        lanes = {row["lane"].removesuffix(end): row["ms"] for row in found if row["lane"].endswith(end)}
        lanes = {lane: lanes[lane] for lane in _COLOURS}
        figure = Figure(figsize=(9, 2.4), layout="constrained")
        axes = figure.subplots()
        for place, (lane, spans) in enumerate(lanes.items()):
            bars = [(start, max(stop - start, 1e-4)) for start, stop in spans]
            axes.broken_barh(bars, (place - 0.35, 0.7), color=_COLOURS[lane], linewidth=0)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(_title(documents[0], what), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(target, dpi=_DPI)

    return draw


DRAWINGS: Mapping[str, Draw] = {
    "s0-transfer-in-off": _transfer_in("off"),
    "s0-transfer-in-on": _transfer_in("on"),
    "s1-profiler-swap-out": _timeline("blocks go to host memory while the next are computed"),
    "s1-profiler-swap-in": _timeline("prompts come from host memory while another is computed"),
    "s1-profiler-overlap": _timeline("copies beside compute, close by", is_close=True),
    "s1-swap-in": _swap_in,
    "s2-stress": _stress,
    "s2-stress-triangle": _triangle,
    "s3-baseline": _baseline,
}
