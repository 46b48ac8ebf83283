"""Simulated caches of runs, without blocks."""

from __future__ import annotations

import pytest

from kvtier.blocks.ages import Rule
from kvtier.blocks.reuse_model import ReuseModel, class_of
from kvtier.blocks.run import Run
from kvtier.blocks.shadows import AgeShadow, Shadow, WorthShadow

CAPACITY = 1000


@pytest.fixture(params=Rule, ids=lambda rule: rule.name)
def shadow(request: pytest.FixtureRequest) -> Shadow:
    rule: Rule = request.param
    return WorthShadow(ReuseModel(), declines=True) if rule is Rule.WORTH else AgeShadow(rule)


def a_run(
    shadow: Shadow, count: int, now: float, capacity: int = CAPACITY, num_new: int = 0, num_uses: int = 1
) -> Run[object]:
    """A run that was just used."""
    run: Run[object] = Run(num_uses=num_uses)
    run.used_at = now
    shadow.use(run, count, num_new, capacity, now)
    return run


def test_a_run_gives_up_what_is_taken_from_it_and_no_more(shadow: Shadow) -> None:
    run = a_run(shadow, 10, 1)

    assert [shadow.take(run, 4), shadow.size_of(run)] == [4, 6]
    assert [shadow.take(run, 9), shadow.size_of(run)] == [6, 0]
    assert shadow.take(run, 1) == 0


def test_the_oldest_run_loses_blocks_when_there_is_no_room() -> None:
    shadow = AgeShadow(Rule.LRU)
    old, middle, new = a_run(shadow, 600, 1), a_run(shadow, 400, 2), a_run(shadow, 700, 3)

    assert [shadow.size_of(run) for run in (old, middle, new)] == [0, 300, 700]


def test_a_run_that_is_used_again_is_the_last_to_lose_blocks() -> None:
    shadow = AgeShadow(Rule.LRU)
    old, other = a_run(shadow, 500, 1), a_run(shadow, 500, 2)
    shadow.take(old, 500)
    again = a_run(shadow, 500, 3)
    a_run(shadow, 400, 4)

    assert [shadow.size_of(run) for run in (old, other, again)] == [0, 100, 500]


def test_a_shadow_shrinks_with_the_room(shadow: Shadow) -> None:
    runs = [a_run(shadow, 500, 1), a_run(shadow, 500, 2), a_run(shadow, 10, 3, capacity=300)]

    assert sum(shadow.size_of(run) for run in runs) <= 300
    assert shadow.size_of(runs[-1]) == 10


def test_a_run_that_was_used_twice_ages_three_times_more_slowly() -> None:
    shadow = AgeShadow(Rule.AGE_PER_USE)
    twice = a_run(shadow, 500, 0, num_uses=2)
    once = a_run(shadow, 500, 8)
    a_run(shadow, 200, 11)  # ages are 11 / 3 and 3
    a_run(shadow, 200, 13)  # and now 13 / 3 and 5

    assert [shadow.size_of(run) for run in (twice, once)] == [300, 300]


def busy_model() -> tuple[ReuseModel, Run[object]]:
    """Prompts with gaps of a second come back, and new ones do not; a run of the former."""
    model = ReuseModel()
    busy = class_of(0.0)
    for _ in range(100):
        model.reused(busy, 1.0)
        model.given_up(0, 1000.0)
    return model, Run(busy, 0.0)


def test_blocks_worth_less_than_all_others_are_declined_but_for_the_first() -> None:
    model, busy = busy_model()
    shadow = WorthShadow(model, declines=True)
    busy.used_at = 1.0
    shadow.use(busy, 900, 900, CAPACITY, 1.0)
    new = a_run(shadow, 200, 1.5, num_new=200)

    newer = a_run(shadow, 200, 1.6, num_new=200)

    assert [shadow.size_of(run) for run in (busy, new, newer)] == [900, 99, 1]


def test_a_shadow_of_a_policy_that_declines_nothing_gives_them_room() -> None:
    model, busy = busy_model()
    shadow = WorthShadow(model, declines=False)
    busy.used_at = 1.0
    shadow.use(busy, 900, 900, CAPACITY, 1.0)
    new = a_run(shadow, 200, 1.5, num_new=200)

    assert (shadow.size_of(busy), shadow.size_of(new)) == (800, 200)


def test_the_run_of_least_worth_loses_blocks_though_it_is_not_the_oldest() -> None:
    model, busy = busy_model()
    shadow = WorthShadow(model, declines=False)
    busy.used_at = 1.0
    shadow.use(busy, 500, 500, CAPACITY, 1.0)
    new = a_run(shadow, 400, 1.1, num_new=400)
    newer = a_run(shadow, 300, 1.2, num_new=300)

    assert [shadow.size_of(run) for run in (busy, new, newer)] == [500, 200, 300]
