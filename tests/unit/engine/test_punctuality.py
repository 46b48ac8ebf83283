"""Tokens are handed out when a step is over, and nobody has the interpreter then but who hands them out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from kvtier.engine.punctuality import Punctuality


class Device:
    """A step that is over at `over_at`; looking at the time, or at the step, takes a little while."""

    def __init__(self) -> None:
        self.now = 100.0
        self.over_at = 0.0
        self.slept_until: list[float] = []
        self.num_looks = 0

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        assert sys.getswitchinterval() == pytest.approx(0.005), "others may go on"
        assert seconds > 0
        self.now += seconds
        self.slept_until.append(self.now)

    def is_done(self) -> bool:
        self.num_looks += 1
        self.now += 1e-6
        return self.now >= self.over_at


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def _after_steps(device: Device, *steps_s: float) -> Punctuality:
    """Steps before this one took so long."""
    punctuality = Punctuality(device.clock, device.sleep)
    for seconds in (1.0, *steps_s):
        device.now += seconds
        punctuality.note_over()
    return punctuality


def test_the_interpreter_is_kept_from_a_moment_before_the_end_until_tokens_are_out() -> None:
    device = Device()
    punctuality = _after_steps(device, 0.0044, 0.0044)
    device.over_at = device.now + 0.0044
    with punctuality.handing_out(device.is_done, has_others=True):
        assert 0 <= device.now - device.over_at < 1e-5
        assert device.over_at - device.slept_until[-1] == pytest.approx(0.0003, abs=1e-5)
        assert sys.getswitchinterval() == pytest.approx(0.01)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_failure_leaves_the_interpreter_to_others() -> None:
    device = Device()
    punctuality = _after_steps(device, 0.0044, 0.0044)
    with pytest.raises(ZeroDivisionError), punctuality.handing_out(device.is_done, has_others=True):
        raise ZeroDivisionError
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_step_that_is_over_sooner_is_seen_soon() -> None:
    device = Device()
    punctuality = _after_steps(device, 0.015, 0.015)
    device.over_at = device.now + 0.003
    with punctuality.handing_out(device.is_done, has_others=True):
        assert device.over_at <= device.now < device.over_at + 0.0006
        assert sys.getswitchinterval() == pytest.approx(0.01)


def test_others_go_on_if_a_step_takes_longer_than_the_last_ones() -> None:
    device = Device()
    punctuality = _after_steps(device, 0.0044, 0.0044)
    began_at = device.now
    device.over_at = began_at + 0.05
    with punctuality.handing_out(device.is_done, has_others=True):
        assert device.now == pytest.approx(began_at + 0.0044 + 0.001, abs=1e-4)
        assert sys.getswitchinterval() == pytest.approx(0.005)


def test_one_step_that_took_longer_changes_nothing() -> None:
    device = Device()
    punctuality = _after_steps(device, 0.0044, 0.0065)
    device.over_at = device.now + 0.0044
    with punctuality.handing_out(device.is_done, has_others=True):
        assert device.now - device.over_at < 1e-5


@pytest.mark.parametrize(("steps_s", "has_others"), [((0.0044, 0.0044), False), ((0.1, 0.1), True), ((), True)])
def test_without_others_or_with_long_steps_nothing_is_waited_for(steps_s: tuple[float, ...], has_others: bool) -> None:
    device = Device()
    punctuality = _after_steps(device, *steps_s)
    began_at = device.now
    device.over_at = began_at + 1.0
    with punctuality.handing_out(device.is_done, has_others=has_others):
        assert device.now == pytest.approx(began_at, abs=1e-5)
        assert not device.num_looks
        assert sys.getswitchinterval() == pytest.approx(0.005)


def test_before_the_first_step_nothing_is_waited_for() -> None:
    device = Device()
    device.over_at = 200.0
    with Punctuality(device.clock, device.sleep).handing_out(device.is_done, has_others=True):
        assert not device.num_looks


def test_two_engines_of_a_process_leave_the_interval_as_it_was() -> None:
    """The second begins while the first hands out, and ends after it."""
    first, second = (_after_steps(Device(), 0.0044, 0.0044) for _ in range(2))
    is_in, may_end = threading.Event(), threading.Event()

    def hand_out() -> None:
        with second.handing_out(lambda: True, has_others=True):
            is_in.set()
            assert may_end.wait(10)

    thread = threading.Thread(target=hand_out)
    with first.handing_out(lambda: True, has_others=True):
        thread.start()
        assert is_in.wait(10)
    assert sys.getswitchinterval() == pytest.approx(0.005)
    may_end.set()
    thread.join(10)
    assert sys.getswitchinterval() == pytest.approx(0.005)
