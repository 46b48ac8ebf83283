"""Tokens are handed out when a step is over, and nobody has the interpreter then but who hands them out."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.engine.punctuality import ASKING_S, KEPT_S, handing_out

_USUAL_S = 0.005


def _interval() -> object:
    return pytest.approx(sys.getswitchinterval(), rel=1e-3)


class Results:
    """Due at 4.1, and there at `done_at`, by a clock that goes on when it is looked at."""

    def __init__(self, done_at: float = 2.0) -> None:
        self.now = 1.0
        self.done_at = done_at
        self.num_looks = 0
        self.was_waited_for = False

    def clock(self) -> float:
        self.now += 1e-5
        return self.now

    @property
    def is_done(self) -> bool:
        assert _interval() == (KEPT_S if self.num_looks else _USUAL_S)
        self.num_looks += 1
        self.now += 1e-5
        return self.now >= self.done_at

    def wait_until_due(self) -> None:
        assert _interval() == ASKING_S, "others may go on, and give way at once"
        self.was_waited_for = True
        self.now = 4.1


class Done:
    """Results that are there."""

    is_done = True

    def wait_until_due(self) -> None:
        raise AssertionError("there is nothing to wait for")


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_USUAL_S)
    yield
    sys.setswitchinterval(before)


def test_the_interpreter_is_kept_from_a_moment_before_the_end_until_tokens_are_out() -> None:
    results = Results(4.1004)
    with handing_out(results, results.clock):
        assert results.now == pytest.approx(4.1004, abs=3e-5)
        assert results.num_looks > 10
        assert _interval() == KEPT_S
    assert _interval() == _USUAL_S


def test_it_is_kept_too_if_all_is_there_at_once() -> None:
    results = Results(0.0)
    with handing_out(results, results.clock):
        assert not results.was_waited_for
        assert _interval() == KEPT_S
    assert _interval() == _USUAL_S


def test_others_go_on_if_the_end_takes_too_long() -> None:
    results = Results(9.0)
    with handing_out(results, results.clock):
        assert results.now == pytest.approx(4.101, abs=3e-5)
        assert _interval() == _USUAL_S
    assert _interval() == _USUAL_S


def test_a_failure_leaves_the_interpreter_to_others() -> None:
    results = Results()
    with pytest.raises(ZeroDivisionError), handing_out(results, results.clock):
        raise ZeroDivisionError
    assert _interval() == _USUAL_S


def test_two_engines_of_a_process_leave_the_interval_as_it_was() -> None:
    """The second begins while the first hands out, and ends after it."""
    is_in, may_end = threading.Event(), threading.Event()

    def hand_out() -> None:
        with handing_out(Done()):
            is_in.set()
            assert may_end.wait(10)

    thread = threading.Thread(target=hand_out)
    with handing_out(Done()):
        thread.start()
        assert is_in.wait(10)
    assert _interval() == _USUAL_S
    may_end.set()
    thread.join(10)
    assert _interval() == _USUAL_S


@pytest.mark.parametrize("left_behind", [ASKING_S, KEPT_S])
def test_what_an_interrupt_left_behind_is_put_right_by_the_next(left_behind: float) -> None:
    with handing_out(Done()):
        pass
    sys.setswitchinterval(left_behind)
    with handing_out(Done()):
        assert _interval() == KEPT_S
    assert _interval() == _USUAL_S


def test_a_thread_that_computes_gives_way_at_once() -> None:
    """By itself it would have the interpreter for a fifth of a second at a time."""
    sys.setswitchinterval(0.2)
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(100))

    class Sleeping:
        is_done = True

        def wait_until_due(self) -> None:
            time.sleep(0.001)

    thread = threading.Thread(target=compute)
    thread.start()
    times = []
    for _ in range(5):
        began_at = time.perf_counter()
        with handing_out(Sleeping()):
            times.append(time.perf_counter() - began_at)
    is_over.set()
    thread.join(10)
    assert min(times) < 0.1
