"""When tokens are due, and who waits then."""

from __future__ import annotations

import threading

import pytest

from kvtier.latency_guard import LatencyGuard, give_way, yield_to

STEP_S = 0.0045


class Clock:
    """Stands still but for sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.guard = LatencyGuard(lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds

    def hand_out(self, *times: float) -> None:
        for at in times:
            self.now = at
            self.guard.note_handed_out()

    def waits_until(self, at: float) -> float:
        """When somebody goes on who comes at `at`."""
        self.now = at
        self.guard.let_pass()
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _times(count: int, step_s: float = STEP_S) -> list[float]:
    return [100.0 + number * step_s for number in range(count)]


def test_nobody_begins_anything_a_moment_before_tokens_are_due(clock: Clock) -> None:
    times = _times(8)
    clock.hand_out(*times)
    due = times[-1] + STEP_S

    for before in (0.004, 0.001, 0.0005):
        assert clock.waits_until(due - before) == due - before
    for before in (0.0004, 0.0001, 0.0, -0.0001):
        assert clock.waits_until(due - before) == pytest.approx(due + 0.0002)
    for after in (0.0003, 0.001, 1.0):
        assert clock.waits_until(due + after) == due + after


def test_nothing_is_known_of_the_first_tokens(clock: Clock) -> None:
    assert clock.waits_until(100.0) == 100.0
    clock.hand_out(*_times(5))
    assert clock.waits_until(100.0 + 5 * STEP_S) == 100.0 + 5 * STEP_S


@pytest.mark.parametrize("late", [(7,), (6,), (5, 7), (4, 5, 6)])
def test_tokens_that_were_late_say_nothing_of_the_next_ones(clock: Clock, late: tuple[int, ...]) -> None:
    clock.hand_out(*(at + 0.0004 * (number in late) for number, at in enumerate(_times(8))))
    due = 100.0 + 8 * STEP_S

    assert clock.waits_until(due - 0.0002) == pytest.approx(due + 0.0002)
    assert clock.waits_until(due - 0.0008) == due - 0.0008


def test_a_pause_is_forgotten_after_some_steps(clock: Clock) -> None:
    clock.hand_out(*_times(8))
    resumed = [200.0 + number * STEP_S for number in range(6)]
    clock.hand_out(*resumed)
    due = resumed[-1] + STEP_S

    assert clock.waits_until(due - 0.0002) == pytest.approx(due + 0.0002)


def test_long_steps_keep_nobody_waiting(clock: Clock) -> None:
    clock.hand_out(*_times(8))
    clock.hand_out(*(110.0 + 0.05 * number for number in range(8)))
    due = 110.0 + 0.05 * 8

    assert clock.waits_until(due - 0.0001) == due - 0.0001


@pytest.mark.parametrize("step_s", [0.0002, 0.001, 0.002, 0.0045, 0.019])
def test_others_have_four_fifths_of_the_time_at_least(clock: Clock, step_s: float) -> None:
    """However short steps are."""
    times = _times(8, step_s)
    clock.hand_out(*times)
    due = times[-1] + step_s
    places = [due - step_s * number / 1000 for number in range(-500, 500)]
    num_waiting = sum(clock.waits_until(at) > at for at in places)

    assert 0 < num_waiting <= 200
    assert max(clock.slept) <= 0.2 * step_s


def test_a_thread_gives_way_as_it_said_and_no_other_does() -> None:
    calls: list[str] = []

    def work() -> None:
        yield_to(lambda: calls.append(threading.current_thread().name))
        give_way()
        give_way()
        yield_to(None)
        give_way()

    thread = threading.Thread(target=work, name="guarded")
    thread.start()
    thread.join()
    give_way()

    assert calls == ["guarded", "guarded"]
