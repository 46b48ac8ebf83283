"""The order of eviction."""

from __future__ import annotations

import pytest

from kvtier.blocks.policies import LruPolicy


def policy_of(*items: str) -> LruPolicy[str]:
    policy: LruPolicy[str] = LruPolicy()
    for item in items:
        policy.add_all([item])
    return policy


def popped(policy: LruPolicy[str]) -> list[str]:
    order = []
    while (item := policy.pop_coldest()) is not None:
        order.append(item)
    return order


def test_the_least_recently_added_goes_first() -> None:
    assert popped(policy_of("a", "b", "c")) == ["a", "b", "c"]


def test_those_that_would_go_next_are_named_and_stay() -> None:
    policy = policy_of("a", "b", "c")

    assert policy.coldest(2) == ["a", "b"]
    assert policy.coldest(9) == ["a", "b", "c"]
    assert len(policy) == 3


def test_an_empty_policy_has_no_victim() -> None:
    policy = policy_of()

    assert policy.pop_coldest() is None
    assert len(policy) == 0


def test_what_is_removed_is_no_victim() -> None:
    policy = policy_of("a", "b", "c")
    policy.remove("b")

    assert len(policy) == 2
    assert popped(policy) == ["a", "c"]


def test_what_is_used_again_is_the_last_to_go() -> None:
    policy = policy_of("a", "b", "c")
    policy.remove("a")
    policy.add_all(["a"])

    assert popped(policy) == ["b", "c", "a"]


def test_pops_that_are_put_back_leave_the_order_as_it_was() -> None:
    policy = policy_of("a", "b", "c", "d")
    victims = [policy.pop_coldest(), policy.pop_coldest()]
    policy.put_back([victim for victim in victims if victim is not None])

    assert popped(policy) == ["a", "b", "c", "d"]


def test_removing_a_stranger_is_a_bug_that_shows() -> None:
    with pytest.raises(KeyError):
        policy_of("a").remove("b")
