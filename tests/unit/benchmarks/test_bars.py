"""A benchmark that is not good enough says so, and its command fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bars import missed
from benchmarks.harness import Result, finish
from benchmarks.vineyard import test_file_store, test_shared_memory

_BARS = {"rate": ">= 0.9", "seconds": "<= 1.5"}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"rate": 0.9, "seconds": 1.5}, []),
        ({"rate": 0.899, "seconds": 1.0}, ["rate"]),
        ({"rate": 1.0, "seconds": 1.51}, ["seconds"]),
        ({"rate": float("nan"), "seconds": 1.0}, ["rate"]),
        ({"seconds": 1.0, "other": 0.0}, ["rate"]),
    ],
)
def test_a_figure_under_its_bar_or_not_measured_is_missed(figures: dict[str, float], expected: list[str]) -> None:
    assert missed(figures, _BARS) == expected


@pytest.mark.parametrize(("rate", "status"), [(0.95, 0), (0.85, 1)])
def test_a_run_that_misses_a_bar_ends_with_status_1_and_is_written_all_the_same(
    tmp_path: Path, rate: float, status: int
) -> None:
    result = Result("some.run", {})
    result.figures.update(rate=rate, seconds=1.0)

    assert finish(result, _BARS, str(tmp_path / "result.json")) == status
    assert json.loads((tmp_path / "result.json").read_text())["figures"]["rate"] == rate


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1e9])
@pytest.mark.parametrize("program", [test_file_store, test_shared_memory])
def test_vineyards_benchmarks_fail_when_a_bar_is_missed(
    program: object, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: dict[str, str] = program.BARS  # type: ignore[attr-defined]
    monkeypatch.setattr("sys.argv", ["benchmark", "--quick", "--json", str(tmp_path / "result.json")])

    def measure(*arguments: object) -> dict[str, float]:
        for argument in arguments:
            if isinstance(argument, Result):
                argument.figures.update(dict.fromkeys(bars, value))
        return dict.fromkeys(bars, value)

    for name in ("measure_rate", "measure_length", "measure_queries", "measure_updates"):
        if hasattr(program, name):
            monkeypatch.setattr(program, name, measure)

    assert program.main() == 1, "no value is good for every bar"  # type: ignore[attr-defined]
