"""Draws a result of stress_test: the time to the first token, by the source of most of the prompt.

python -m examples.use_remote_KV_cache.plot RESULT.json OUT.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

_NAMES = {
    "computed": "computed",
    "disk": "cache server's disk",
    "server": "cache server's memory",
    "host": "host memory",
    "device": "GPU memory",
}
_COLOURS = {"computed": "#b0483a", "disk": "#c98a2b", "server": "#5b8a72", "host": "#3f7f93", "device": "#35527e"}


def sources_of(rows: Sequence[Mapping[str, object]]) -> dict[str, list[float]]:
    """Seconds to the first token, by the slowest place that a tenth of the prompt or more came from."""
    times: dict[str, list[float]] = {name: [] for name in _NAMES}
    for row in rows:
        cached, seconds = row["cached"], row["ttft_s"]
        assert isinstance(cached, dict)
        assert isinstance(seconds, float)
        least = sum(cached.values()) / 10
        source = next((name for name in _NAMES if cached.get(name, 0) > least), "computed")
        times[source].append(seconds)
    return {name: found for name, found in times.items() if found}


def draw(result: Mapping[str, object], target: Path, dpi: int = 150) -> None:
    rows, settings = result["rows"], result["settings"]
    assert isinstance(rows, list)
    assert isinstance(settings, dict)
    times = sources_of(rows)
    medians = {name: statistics.median(found) for name, found in times.items()}
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [_NAMES[name] for name in medians], list(medians.values()), color=[_COLOURS[name] for name in medians]
    )
    axes.bar_label(bars, [f"{seconds:.2f} s" for seconds in medians.values()], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(medians.values()))
    axes.set_xlabel("seconds")
    axes.set_title(f"Time to the first token, prompts of {settings['prompt_tokens']:,} tokens", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=dpi)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text()), arguments.target)


if __name__ == "__main__":
    main()
