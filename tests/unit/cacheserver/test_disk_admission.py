"""A budget of writes a day, and what is written within it."""

from __future__ import annotations

import pytest

from kvtier.cacheserver.disk_admission import DAY_S, DiskAdmission, WriteBudget
from kvtier.simulate.replay import VirtualClock

HOUR_S = 3600.0
A_DAY = 24_000
AN_HOUR = 1000


def test_a_day_may_write_what_the_budget_says_and_the_hour_before_it() -> None:
    clock = VirtualClock()
    budget = WriteBudget(A_DAY, clock)
    num_written = 0

    for second in range(0, int(DAY_S), 10):
        clock.now_s = float(second)
        while not budget.is_spent:
            budget.spend(7)
            num_written += 7

    assert A_DAY <= num_written <= A_DAY + AN_HOUR + 7


def test_a_long_rest_makes_up_for_an_hour_only() -> None:
    clock = VirtualClock()
    budget = WriteBudget(A_DAY, clock)

    clock.now_s = 30 * DAY_S

    assert budget.left_bytes == pytest.approx(AN_HOUR)


def test_what_was_not_written_after_all_is_given_back_and_what_was_too_much_is_made_up_for() -> None:
    clock = VirtualClock()
    budget = WriteBudget(A_DAY, clock)

    budget.spend(3 * AN_HOUR)
    budget.spend(-AN_HOUR)
    assert budget.left_bytes == pytest.approx(-AN_HOUR)
    clock.now_s = HOUR_S
    assert budget.is_spent
    clock.now_s += 1.0
    assert not budget.is_spent
    assert budget.is_short


def test_half_of_the_burst_is_for_new_blocks_and_the_rest_for_what_is_worth_more() -> None:
    budget = WriteBudget(A_DAY, VirtualClock())
    admission = DiskAdmission("commit", budget)

    assert admission.takes_new(1)
    admission.spend(AN_HOUR // 2 + 1)
    assert not admission.takes_new(3)
    assert admission.takes_valued
    admission.spend(AN_HOUR // 2)
    assert not admission.takes_valued
    assert admission.levels() == {"disk_withheld_blocks": 3, "disk_budget_left_bytes": 0.0}


def test_without_a_budget_nothing_is_withheld() -> None:
    admission = DiskAdmission("commit")

    admission.spend(1 << 60)

    assert admission.takes_new(1)
    assert not admission.looks_at_reused
    assert not admission.looks_at_leaving
    assert admission.levels() == {}


def test_a_disk_that_stores_what_is_used_again_stores_nothing_else() -> None:
    admission = DiskAdmission("reuse", WriteBudget(A_DAY, VirtualClock()))

    assert not admission.takes_new(5)
    assert admission.looks_at_reused
    assert not admission.looks_at_leaving
    assert admission.num_withheld == 0
