"""Tokens are handed out when a step is over, and nobody has the interpreter then but who hands them out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from kvtier.engine.punctuality import handing_out

_USUAL_S = 0.005
_KEPT_S = 0.01


class Results:
    """Due at 4.1, and there at `done_at`, by a clock that goes on when it is looked at."""

    def __init__(self, done_at: float) -> None:
        self.now = 1.0
        self.done_at = done_at
        self.num_looks = 0

    def clock(self) -> float:
        self.now += 1e-5
        return self.now

    @property
    def is_done(self) -> bool:
        assert sys.getswitchinterval() == pytest.approx(_KEPT_S)
        self.num_looks += 1
        self.now += 1e-5
        return self.now >= self.done_at

    def wait_until_due(self) -> None:
        assert sys.getswitchinterval() == pytest.approx(_USUAL_S), "others may go on"
        self.now = 4.1


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
        assert sys.getswitchinterval() == pytest.approx(_KEPT_S)
    assert sys.getswitchinterval() == pytest.approx(_USUAL_S)


def test_it_is_kept_too_if_all_is_there_at_once() -> None:
    results = Results(2.0)
    with handing_out(results, results.clock):
        assert results.num_looks == 1
        assert sys.getswitchinterval() == pytest.approx(_KEPT_S)


def test_others_go_on_if_the_end_takes_too_long() -> None:
    results = Results(9.0)
    with handing_out(results, results.clock):
        assert results.now == pytest.approx(4.101, abs=3e-5)
        assert sys.getswitchinterval() == pytest.approx(_USUAL_S)
    assert sys.getswitchinterval() == pytest.approx(_USUAL_S)


def test_a_failure_leaves_the_interpreter_to_others() -> None:
    results = Results(2.0)
    with pytest.raises(ZeroDivisionError), handing_out(results, results.clock):
        raise ZeroDivisionError
    assert sys.getswitchinterval() == pytest.approx(_USUAL_S)


def test_two_engines_of_a_process_leave_the_interval_as_it_was() -> None:
    """The second begins while the first hands out, and ends after it."""
    first, second = Results(2.0), Results(2.0)
    is_in, may_end = threading.Event(), threading.Event()

    def hand_out() -> None:
        second.wait_until_due = lambda: None  # type: ignore[method-assign]
        with handing_out(second, second.clock):
            is_in.set()
            assert may_end.wait(10)

    thread = threading.Thread(target=hand_out)
    with handing_out(first, first.clock):
        thread.start()
        assert is_in.wait(10)
    assert sys.getswitchinterval() == pytest.approx(_USUAL_S)
    may_end.set()
    thread.join(10)
    assert sys.getswitchinterval() == pytest.approx(_USUAL_S)
