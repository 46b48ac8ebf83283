"""LRU's record, and who rules."""

from __future__ import annotations

import itertools

from kvtier.blocks.duel import Duel
from kvtier.blocks.run import Run

CAPACITY = 1000


def a_duel() -> Duel:
    """A duel in which the other policy has had its time to learn."""
    duel = Duel()
    asked_until_the_other_is_tried(duel)
    return duel


def a_run(duel: Duel, count: int, capacity: int = CAPACITY) -> Run[object]:
    """A run that was just used."""
    run: Run[object] = Run()
    duel.use(run, count, capacity)
    return run


def lost_by_the_other(duel: Duel, count: int) -> None:
    """A prompt that LRU would have had, and the other policy did not keep."""
    duel.missed(a_run(duel, count), count)


def missed_by_both(duel: Duel, count: int) -> None:
    duel.missed(None, count)
    a_run(duel, count)


def until_lru_rules(duel: Duel) -> None:
    for _ in range(10_000):
        if duel.lru_rules:
            return
        lost_by_the_other(duel, 10)
    raise AssertionError("LRU was ahead all the time and does not rule")


def asked_until_the_other_is_tried(duel: Duel) -> int:
    """How many blocks were asked for until then."""
    count = 0
    while duel.lru_rules:
        missed_by_both(duel, 10)
        count += 10
    return count


def test_the_oldest_run_loses_blocks_when_there_is_no_room() -> None:
    duel = Duel()
    old, middle = a_run(duel, 600), a_run(duel, 400)
    new = a_run(duel, 700)

    assert (old.lru_size, middle.lru_size, new.lru_size) == (0, 300, 700)


def test_a_run_that_is_used_again_is_the_last_to_lose_blocks() -> None:
    duel = Duel()
    old, other = a_run(duel, 500), a_run(duel, 500)
    duel.hit(old, 500)
    again = a_run(duel, 500)
    a_run(duel, 400)

    assert (old.lru_size, other.lru_size, again.lru_size) == (0, 100, 500)


def test_the_record_shrinks_with_the_room() -> None:
    duel = Duel()
    old, new = a_run(duel, 500), a_run(duel, 500)
    a_run(duel, 10, capacity=300)

    assert (old.lru_size, new.lru_size) == (0, 290)


def test_lru_rules_at_first_for_two_capacities() -> None:
    duel = Duel()
    a_run(duel, CAPACITY)

    assert 2 * CAPACITY <= asked_until_the_other_is_tried(duel) <= 2.1 * CAPACITY


def test_blocks_that_move_to_another_run_are_no_hits() -> None:
    duel = a_duel()
    for _ in range(1000):
        old = a_run(duel, 10)
        duel.moved(old, 10)
        a_run(duel, 10)

    assert old.lru_size == 0
    assert not duel.lru_rules


def test_lru_rules_once_it_had_more_hits() -> None:
    duel = a_duel()
    until_lru_rules(duel)


def test_lru_does_not_rule_for_one_prompt() -> None:
    duel = a_duel()
    lost_by_the_other(duel, 500)

    assert not duel.lru_rules


def test_lru_does_not_rule_while_the_other_has_as_many_hits() -> None:
    duel = a_duel()
    for _ in range(2000):
        duel.hit(a_run(duel, 10), 10)
        missed_by_both(duel, 10)

    assert not duel.lru_rules


def test_the_other_is_tried_again_after_twice_the_time_for_each_try_that_failed() -> None:
    duel = a_duel()
    waits = []
    for _ in range(8):
        until_lru_rules(duel)
        waits.append(asked_until_the_other_is_tried(duel))

    assert all(after >= 1.9 * before for before, after in itertools.pairwise(waits[:5]))
    assert waits[-1] <= 65 * CAPACITY, "it is tried again at some time"


def test_a_try_that_gets_ahead_makes_the_next_wait_short_again() -> None:
    duel = a_duel()
    for _ in range(4):
        until_lru_rules(duel)
        long = asked_until_the_other_is_tried(duel)
    for _ in range(1000):
        a_run(duel, CAPACITY)
        duel.hit(Run(), 10)  # which LRU has not
    until_lru_rules(duel)

    assert asked_until_the_other_is_tried(duel) < long / 2
