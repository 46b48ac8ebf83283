"""The breaker: open at once for a peer that is gone, later for one that is slow."""

from __future__ import annotations

from kvtier.client.breaker import Breaker


def after_timeouts(count: int) -> Breaker:
    breaker = Breaker()
    for _ in range(count):
        breaker.fail(timed_out=True)
    return breaker


def test_a_new_breaker_is_closed() -> None:
    assert not Breaker().is_open


def test_a_peer_that_is_gone_opens_it_at_once() -> None:
    breaker = Breaker()

    assert breaker.fail(timed_out=False)
    assert breaker.is_open


def test_a_slow_peer_opens_it_with_the_third_timeout_in_a_row() -> None:
    breaker = Breaker()

    assert [breaker.fail(timed_out=True) for _ in range(3)] == [False, False, True]
    assert breaker.is_open


def test_an_answer_between_timeouts_starts_the_count_anew() -> None:
    breaker = after_timeouts(2)
    breaker.succeed()

    assert [breaker.fail(timed_out=True) for _ in range(3)] == [False, False, True]


def test_only_the_failure_that_opens_it_says_so() -> None:
    breaker = after_timeouts(3)

    assert not breaker.fail(timed_out=True)
    assert not breaker.fail(timed_out=False)


def test_a_late_answer_does_not_close_it() -> None:
    breaker = after_timeouts(3)
    breaker.succeed()

    assert breaker.is_open


def test_a_peer_that_is_well_again_closes_it_and_all_is_forgotten() -> None:
    breaker = after_timeouts(3)
    breaker.close()

    assert not breaker.is_open
    assert not breaker.fail(timed_out=True)
