"""QPS over hit rate, from a result of `benchmarks.prefix_caching.baseline`, as a PNG. Needs matplotlib.

python -m benchmarks.prefix_caching.plot RESULT.json FIGURE.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.line_plot import draw_lines

_COLORS = {"naive": "#7f7f7f", "disable_prefix_caching": "#bcbd22", "prefix_caching": "#1f77b4", "yoco": "#d62728"}


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    document = json.loads(Path(sys.argv[1]).read_text())
    draw(document["rows"], document["settings"], Path(sys.argv[2]))


def draw(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], target: Path, dpi: int = 150) -> None:
    """Raises `SystemExit` with one sentence without matplotlib or without rows to draw."""
    draw_lines(
        _lines(rows),
        target,
        title=(
            f"{settings.get('shape')} on {settings.get('device')}: {settings.get('input_tokens')} tokens in, "
            f"{settings.get('output_tokens')} out"
        ),
        x_label="share of the prompt that is a common prefix, %",
        y_label="requests per second",
        style_of=_style_of,
        dpi=dpi,
    )


def _style_of(name: str) -> dict[str, str]:
    manager = name.partition(",")[0].removesuffix("-sync").removesuffix("-async-2")
    style = "--" if name.endswith("-sync") else ":" if manager not in _COLORS else "-"
    return {"linestyle": style, "color": _COLORS.get(manager, "black")}


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[float, float]]:
    """QPS by hit rate for each variant, and the sweep and vLLM's row if present."""
    lines: dict[str, dict[float, float]] = {}
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
