"""Tokens over minutes, hours and days, with a clock that tests move."""

from __future__ import annotations

from kvtier.api.token_history import TokenHistory


def test_each_span_has_what_ended_in_it() -> None:
    now = 1_000_000.0
    history = TokenHistory(lambda: now)
    for _ in range(3):
        history.add(100, {"device": 10, "server": 20, "disk": 0})
        now += 1800.0
    now -= 1790.0

    assert history.over(300.0).prompt == 100
    assert history.over(3600.0).prompt == 200
    day = history.over(86_400.0)
    assert (day.prompt, day.requests, day.cached) == (300, 3, {"device": 30, "server": 60})


def test_what_is_kept_is_bounded_however_long_it_runs() -> None:
    now = 0.0
    history = TokenHistory(lambda: now)
    for number in range(20_000):
        history.add(1, {f"tier {number}": 1})
        now += 10.0

    assert len(history.steps("hour")) <= 361
    assert len(history.steps("day")) <= 289
    assert all(len(step.cached) <= 17 for step in history.steps("day"))
    assert len(history.total.cached) <= 17
    assert history.total.prompt == 20_000


def test_old_steps_are_not_told_after_a_quiet_time() -> None:
    now = 0.0
    history = TokenHistory(lambda: now)
    history.add(1, {})
    now = 7200.0
    assert history.steps("hour") == []
    assert len(history.steps("day")) == 1
