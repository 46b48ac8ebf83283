"""The interval at which threads take turns: short while something is waited for, and then as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvtier.transfer.quick_turns import QuickTurns

QUICK_S = 0.0005


@pytest.fixture
def before_s() -> Iterator[float]:
    found = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(found)


def test_turns_are_quick_until_the_last_of_several_has_ended(before_s: float) -> None:
    turns = QuickTurns(QUICK_S)
    turns.begin()
    turns.begin()
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(QUICK_S)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(before_s)
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(QUICK_S)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(before_s)


def test_an_end_may_come_before_its_begin(before_s: float) -> None:
    """A job may end before the thread that submitted it continues."""
    turns = QuickTurns(QUICK_S)
    turns.end()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(before_s)
    turns.begin()
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(before_s)


def test_a_shorter_interval_stays(before_s: float) -> None:
    sys.setswitchinterval(QUICK_S / 5)
    turns = QuickTurns(QUICK_S)
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(QUICK_S / 5)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(QUICK_S / 5)


def test_what_somebody_sets_meanwhile_stays(before_s: float) -> None:
    turns = QuickTurns(QUICK_S)
    turns.begin()
    sys.setswitchinterval(0.02)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.02)
