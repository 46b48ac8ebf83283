"""What `--cases` chooses: a sample and its rest are everything, and nothing occurs only in the rest."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.sampling import covering, every_nth

pytest_plugins = ("pytester",)

CONFTEST = Path(__file__).parents[2] / "conftest.py"
ROOT = Path(__file__).parents[3]
CASES = [dict(zip("abc", values, strict=True)) for values in itertools.product(range(4), range(3), range(2))]

TESTS = """
import pytest
from hypothesis import given, strategies as st


@pytest.mark.sampled
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", "xyz")
def test_product(a, b):
    pass


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("a", range(6))
def test_every_second(a):
    pass


@pytest.mark.slow
def test_slow():
    pass


@given(st.integers())
def test_property(number):
    pass


@pytest.mark.scaled
def test_scaled():
    pass


def test_plain():
    pass
"""


@pytest.mark.parametrize("together", [1, 2])
def test_a_sample_has_all_that_occurs_and_is_the_same_every_time(together: int) -> None:
    chosen = covering(CASES, together)

    def occurring(cases: list[dict[str, int]]) -> set[tuple[tuple[str, int], ...]]:
        return {part for case in cases for part in itertools.combinations(case.items(), together)}

    assert occurring([CASES[position] for position in chosen]) == occurring(CASES)
    assert len(chosen) < len(CASES)
    assert covering(CASES, together) == chosen


def test_every_nth_begins_with_the_first() -> None:
    assert every_nth(CASES, 10) == {0, 10, 20}


@pytest.mark.slow
def test_a_sample_and_the_rest_are_everything(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini(
        "[pytest]\nmarkers =\n    slow\n    sampled\n    scaled\naddopts = -p no:cacheprovider -p no:xdist"
    )
    pytester.makepyfile(TESTS)

    def names(*options: str) -> set[str]:
        listed = pytester.runpytest_subprocess("--collect-only", "-q", *options).outlines
        return {line.partition("::")[2] for line in listed if "::" in line}

    sample, rest = names("--cases", "sample"), names("--cases", "rest")

    assert len(sample | rest) == 9 + 6 + 4, "everything"
    assert sample & rest == {"test_property", "test_scaled"}
    assert len([name for name in sample if name.startswith("test_product")]) == 3
    assert len([name for name in sample if name.startswith("test_every_second")]) == 3
    assert "test_slow" not in sample
    assert len(names("--cases", "sample", "--share", "1/3")) == len(sample) // 3
