"""A plan as a PNG, drawn with matplotlib if that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planning.plan import Effect, Plan, PlanPoint
from kvtier.sizes import format_size

_SIZE_INCHES = (11.0, 7.5)


def draw_png(plan: Plan, path: Path) -> None:
    """Draw the plan. Raises `ConfigError` without matplotlib, and for a file that cannot be written."""
    figure = _figure()
    points = plan.by_memory
    sizes = [point.memory_bytes for point in points]
    (hits, ttft), (saved, disk) = figure.subplots(2, 2)
    figure.suptitle(plan.title)
    for label, effects in _effects(points).items():
        hits.plot(sizes, [100 * effect.hit_share for effect in effects], marker="o", label=label)
        ttft.plot(sizes, [effect.mean_ttft_s for effect in effects], marker="o", label=f"{label}, mean")
        late = [effect.late_ttft_s for effect in effects]
        if None not in late:
            ttft.plot(sizes, late, marker="o", label=f"{label}, p90")
        saved.plot(sizes, [effect.saved_gpu_s / 3600 for effect in effects], marker="o", label=label)
    _finish(hits, sizes, "hits, % of prompt tokens, over memory")
    _finish(ttft, sizes, "time to first token, s, over memory")
    _finish(saved, sizes, f"{plan.gpu} hours a day saved, over memory")
    if plan.by_disk:
        disk_sizes = [point.disk_bytes for point in plan.by_disk]
        for label, effects in _effects(plan.by_disk).items():
            disk.plot(disk_sizes, [100 * effect.hit_share for effect in effects], marker="o", label=label)
        memory = format_size(plan.by_disk[0].memory_bytes)
        _finish(disk, disk_sizes, f"hits, %, over disk below {memory} of memory")
    else:
        disk.set_axis_off()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _effects(points: Sequence[PlanPoint]) -> dict[str, list[Effect]]:
    """The effects by policy; the adaptive policy's only if every size was simulated."""
    adaptive = [point.adaptive for point in points if point.adaptive is not None]
    return {"LRU": [point.lru for point in points], **({"adaptive": adaptive} if len(adaptive) == len(points) else {})}


def _figure() -> Any:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError("a PNG needs matplotlib (pip install matplotlib); --html needs nothing") from error
    return figures.Figure(figsize=_SIZE_INCHES, layout="constrained")


def _finish(axes: Any, sizes: list[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(0, 100 if title.startswith("hits") else None)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
