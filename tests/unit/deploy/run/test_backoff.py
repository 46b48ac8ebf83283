"""How long a part that died has to wait."""

from __future__ import annotations

from kvtier.deploy.run.backoff import Backoff


def test_waits_double_up_to_half_a_minute() -> None:
    backoff = Backoff()

    assert [backoff.note_failure(0.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_part_that_died_soon_after_it_was_ready_waits_longer_each_time() -> None:
    backoff = Backoff()

    assert [backoff.note_failure(ran_s) for ran_s in (59.0, 1.0, 30.0)] == [0.5, 1, 2]


def test_a_minute_without_failure_makes_it_new() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.note_failure(0.0)

    assert [backoff.note_failure(ran_s) for ran_s in (61.0, 0.0)] == [0.5, 1]
