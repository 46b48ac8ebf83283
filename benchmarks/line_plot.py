"""Draws a line plot as a PNG. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Lines = Mapping[str, Mapping[float, float]]


def draw_lines(
    lines: Lines,
    target: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    has_log_x: bool = False,
    style_of: Callable[[str], Mapping[str, Any]] = lambda name: {},
    dpi: int = 150,
) -> None:
    """Draw a line for each name, with its points by x. Raises `SystemExit` if matplotlib or lines are missing."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib") from error
    if not lines:
        raise SystemExit("the result has nothing to draw")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in lines.items():
        xs, ys = zip(*sorted(points.items()), strict=True)
        axes.plot(xs, ys, **{"marker": "o", "markersize": 4, "label": name, **style_of(name)})
    if has_log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x in points})
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=dpi)
    pyplot.close(figure)
