"""The lengths of steps, on a clock that the test sets."""

from __future__ import annotations

import pytest

from kvtier.transfer.step_pace import StepPace


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def pace(now: list[float]) -> StepPace:
    return StepPace(lambda: now[0])


def test_the_shortest_of_the_last_steps_counts(now: list[float], pace: StepPace) -> None:
    for length_s in (0.5, 0.2, 0.25, 0.3):
        pace.note_step(is_idle=False)
        now[0] += length_s
    pace.note_step(is_idle=False)
    assert pace.shortest_s == pytest.approx(0.2)

    for _ in range(8):
        now[0] += 0.4
        pace.note_step(is_idle=False)
    assert pace.shortest_s == pytest.approx(0.4)


def test_time_without_work_is_no_step(now: list[float], pace: StepPace) -> None:
    pace.note_step(is_idle=False)
    assert pace.shortest_s == 0.0
    now[0] += 0.01
    pace.note_step(is_idle=True)
    assert pace.is_idle
    now[0] += 0.001
    pace.note_step(is_idle=False)

    assert not pace.is_idle
    assert pace.shortest_s == 0.0
