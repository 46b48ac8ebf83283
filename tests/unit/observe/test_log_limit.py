"""One line per subject and minute."""

from __future__ import annotations

import logging

import pytest

from kvtier.observe.log_limit import LogLimit


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> LogLimit:
    return LogLimit(logging.getLogger("kvtier.test"), clock=clock)


def test_a_line_that_repeats_is_written_once(limit: LogLimit, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        limit.warning("down", "server %s failed %d", "a", number)

    assert caplog.messages == ["server a failed 0"]
    assert caplog.records[0].levelno == logging.WARNING


def test_after_a_minute_the_next_line_says_how_many_were_held_back(
    limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        limit.warning("down", "failed")
    clock.now_s += 60
    limit.warning("down", "failed")

    assert caplog.messages == ["failed", "failed (3 like it in the last 60 s)"]


def test_just_before_the_minute_is_over_nothing_is_written(
    limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limit.warning("down", "failed")
    clock.now_s += 59.9
    limit.warning("down", "failed")

    assert len(caplog.messages) == 1


def test_a_lines_minute_starts_with_the_line_that_was_written(
    limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        limit.warning("down", "failed")
        clock.now_s += 30

    assert caplog.messages == ["failed", "failed (1 like it in the last 60 s)"]


def test_each_subject_has_a_minute_of_its_own(limit: LogLimit, caplog: pytest.LogCaptureFixture) -> None:
    limit.warning("a", "first")
    limit.warning("b", "second")

    assert caplog.messages == ["first", "second"]


def test_a_count_starts_anew_once_it_was_told(limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    limit.warning("a", "failed")
    limit.warning("a", "failed")
    for _ in range(2):
        clock.now_s += 60
        limit.warning("a", "failed")

    assert caplog.messages[-1] == "failed"


def test_as_a_filter_it_holds_back_warnings_that_repeat(
    limit: LogLimit, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = logging.getLogger("kvtier.test.theirs")
    theirs.addFilter(limit.filter)
    try:
        for _ in range(3):
            theirs.warning("invalid request")
            theirs.error("failed")
        clock.now_s += 61
        theirs.warning("invalid request")
    finally:
        theirs.removeFilter(limit.filter)

    assert caplog.messages == ["invalid request", *["failed"] * 3, "invalid request (2 like it in the last 60 s)"]
