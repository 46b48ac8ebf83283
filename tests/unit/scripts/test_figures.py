"""README's figures and docs/figures.md are what benchmarks/results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import figures


def test_the_documents_are_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["figures", "--check"])

    assert figures.main() == 0, "run python scripts/figures.py"


@pytest.mark.parametrize(
    ("value", "aim", "is_met"), [(1.1, "≤ 1.15", True), (1.2, "≤ 1.15", False), (0.9, "≥ 0.9", True), (5.0, "", True)]
)
def test_a_figure_that_misses_its_aim_is_marked(value: float, aim: str, is_met: bool) -> None:
    assert figures.is_met(value, aim) is is_met
    assert figures.cell(value, aim).endswith(figures.MISSED) is not is_met


def test_the_readme_has_ten_figures_each_with_a_peer() -> None:
    _, _, *rows = figures.readme_lines()

    assert len(rows) == 10
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_a_document_that_differs_fails_the_check_and_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "figures.md"
    stale.write_text("old")
    monkeypatch.setattr(figures, "PAGE", stale)
    monkeypatch.setattr("sys.argv", ["figures", "--check"])

    assert figures.main() == 1
    assert "figures.md" in capsys.readouterr().err
    assert stale.read_text() == "old"
