"""QPS over hit rate, from a result of `benchmarks.prefix_caching.baseline`, as a PNG. Needs matplotlib.

python -m benchmarks.prefix_caching.plot RESULT.json FIGURE.png
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = {"naive": "#7f7f7f", "disable_prefix_caching": "#bcbd22", "prefix_caching": "#1f77b4", "yoco": "#d62728"}


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    document = json.loads(Path(sys.argv[1]).read_text())
    draw(document["rows"], document["settings"], Path(sys.argv[2]))


def draw(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], target: Path) -> None:
    """Raises `SystemExit` with one sentence without matplotlib or without rows to draw."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib") from error
    lines = _lines(rows)
    if not lines:
        raise SystemExit("the result has no QPS over hit rates")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in lines.items():
        manager = name.partition(",")[0].removesuffix("-sync").removesuffix("-async-2")
        style = "--" if name.endswith("-sync") else ":" if manager not in _COLORS else "-"
        hit_rates, qps = zip(*sorted(points.items()), strict=True)
        axes.plot(hit_rates, qps, style, marker="o", markersize=4, color=_COLORS.get(manager, "black"), label=name)
    axes.set_xlabel("share of the prompt that is a common prefix, %")
    axes.set_ylabel("requests per second")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{settings.get('shape')} on {settings.get('device')}: {settings.get('input_tokens')} tokens in, "
        f"{settings.get('output_tokens')} out",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """QPS by hit rate for each variant; the sweep and vLLM's row where there are such rows."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        part, hit_rate = row.get("part"), int(row.get("hit %", 0))
        if part == "table":
            for name, value in row.items():
                if isinstance(value, (int, float)) and name.endswith(("-sync", "-async-2")):
                    lines.setdefault(name, {})[hit_rate] = value
        elif part == "sweep":
            lines.setdefault(f"prefix_caching-async-2, {row['prompts']} prompts", {})[hit_rate] = row["QPS"]
            if row.get("vLLM 0.24"):
                lines.setdefault("vLLM 0.24, 1000 prompts", {})[hit_rate] = row["vLLM 0.24"]
    return lines


if __name__ == "__main__":
    main()
