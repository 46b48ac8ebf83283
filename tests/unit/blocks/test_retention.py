"""Blocks that somebody has retained: they go last, within a budget, until their time is over."""

from __future__ import annotations

import math

import pytest

from kvtier.blocks.block import Block, PrefixIndex, Presence
from kvtier.blocks.fair_policy import FairPolicy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.pool import BlockPool
from kvtier.blocks.retaining_policy import ARRIVAL_S
from kvtier.blocks.retention import MAX_TTL_S, Retention
from kvtier.blocks.share import Share
from kvtier.errors import ConfigError

HOUR = Retention(3600.0)


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(*texts: str) -> list[BlockHash]:
    return [BlockHash(text.encode().ljust(32, b"\0")) for text in texts]


def numbered(count: int, prefix: str = "flood") -> list[BlockHash]:
    return names(*(f"{prefix} {number}" for number in range(count)))


def store(pool: BlockPool, index: PrefixIndex, hashes: list[BlockHash]) -> list[Block]:
    grant = pool.reserve(index, hashes)
    pool.commit(grant.blocks)
    pool.free(grant.blocks)
    return grant.blocks


def present(index: PrefixIndex, *texts: str) -> list[bool]:
    return [index.presence(block_hash) is Presence.READY for block_hash in names(*texts)]


def a_pool(num_units: int = 8) -> tuple[BlockPool, PrefixIndex, Clock]:
    clock = Clock()
    return BlockPool(num_units, clock=clock), PrefixIndex(1), clock


def test_a_retained_block_outlives_a_flood_of_others() -> None:
    pool, index, _ = a_pool()
    store(pool, index, names("a", "b", "other"))

    assert pool.retain(index, names("a", "b"), HOUR, 4) == 2
    for block_hash in numbered(100):
        store(pool, index, [block_hash])

    assert present(index, "a", "b", "other") == [True, True, False]


def test_at_the_end_of_its_time_it_is_an_ordinary_block() -> None:
    pool, index, clock = a_pool()
    store(pool, index, names("a"))
    pool.retain(index, names("a"), HOUR, 4)

    clock.now = 3600.0
    store(pool, index, numbered(8))

    assert pool.retained_units() == 0
    assert present(index, "a") == [False]


def test_who_asks_again_renews_the_time_and_never_shortens_it() -> None:
    pool, index, clock = a_pool()
    store(pool, index, names("a"))
    pool.retain(index, names("a"), HOUR, 4)

    clock.now = 3000.0
    assert pool.retain(index, names("a"), Retention(60.0), 4) == 1
    pool.retain(index, names("a"), HOUR, 4)
    clock.now = 6500.0
    store(pool, index, numbered(20))
    assert present(index, "a") == [True]
    clock.now = 6600.0

    assert pool.retained_units() == 0


def test_a_block_is_retained_from_the_moment_it_comes() -> None:
    pool, index, _ = a_pool()

    assert pool.retain(index, names("a", "b"), HOUR, 4) == 2
    assert pool.retained_units() == 2
    store(pool, index, names("a", "b"))
    store(pool, index, numbered(50))

    assert present(index, "a", "b") == [True, True]


def test_what_never_comes_is_not_waited_for_all_the_time() -> None:
    pool, index, clock = a_pool()
    pool.retain(index, names("a", "b"), HOUR, 4)
    store(pool, index, names("b"))

    clock.now = ARRIVAL_S
    assert pool.retained_units() == 1
    store(pool, index, numbered(50))

    assert present(index, "b") == [True]


def test_a_block_whose_writer_gave_up_frees_its_part_of_the_budget() -> None:
    pool, index, clock = a_pool()
    grant = pool.reserve(index, names("a"))
    pool.retain(index, names("a"), HOUR, 1)
    pool.free(grant.blocks)

    clock.now = ARRIVAL_S

    assert pool.retain(index, names("b"), HOUR, 1) == 1


def test_the_leading_ones_are_retained_up_to_the_budget() -> None:
    pool, index, _ = a_pool()
    store(pool, index, names("a", "b", "c"))

    assert pool.retain(index, names("a", "b", "c"), HOUR, 2) == 2
    assert pool.retained_units() == 2
    store(pool, index, numbered(50))

    assert present(index, "a", "b", "c") == [True, True, False]


def test_an_account_has_a_limit_of_its_own() -> None:
    pool, index, _ = a_pool()

    assert pool.retain(index, names("a", "b"), Retention(60.0, account="alice", account_units=1), 4) == 1
    assert pool.retain(index, names("c", "d", "e", "f"), Retention(60.0, account="bob", account_units=9), 4) == 3
    assert pool.retained_units() == 4


def test_a_higher_priority_takes_the_place_of_a_lower_one_of_the_same_account_only() -> None:
    pool, index, _ = a_pool()
    pool.retain(index, names("a", "b"), Retention(60.0, 10, "alice"), 2)

    assert pool.retain(index, names("c"), Retention(60.0, 90, "bob"), 2) == 0
    assert pool.retain(index, names("c"), Retention(60.0, 10, "alice"), 2) == 0
    assert pool.retain(index, names("c"), Retention(60.0, 11, "alice"), 2) == 1
    assert pool.retained_units() == 2


def test_an_ask_that_cannot_be_granted_costs_its_account_nothing() -> None:
    pool, index, _ = a_pool()
    wide = PrefixIndex(4)
    pool.retain(index, names("a"), Retention(60.0, 10, "alice"), 3)

    assert pool.retain(wide, names("w"), Retention(60.0, 90, "alice"), 3) == 0
    assert pool.retained_units() == 1


def test_where_all_else_is_leased_there_is_no_room_rather_than_a_broken_word() -> None:
    pool, index, clock = a_pool(4)
    store(pool, index, names("kept", "held"))
    pool.retain(index, names("kept"), HOUR, 4)
    lease = pool.match(index, names("held"))

    assert len(store(pool, index, numbered(5))) == 2
    assert present(index, "kept", "held") == [True, True]
    clock.now = 3600.0
    assert len(store(pool, index, numbered(5, "later"))) == 3
    pool.free(lease.blocks)


def test_a_large_block_does_not_push_retained_neighbours_out() -> None:
    pool, index, _ = a_pool(4)
    store(pool, index, names("a", "b", "c", "d"))
    pool.retain(index, names("b"), HOUR, 4)

    assert store(pool, PrefixIndex(3), names("wide")) == []
    assert len(store(pool, PrefixIndex(2), names("wide"))) == 1
    assert present(index, "b") == [True]


def test_a_prompt_whose_time_is_over_loses_its_end_first() -> None:
    pool, index, clock = a_pool(4)
    store(pool, index, names("a", "b", "c", "d"))
    pool.retain(index, names("a", "b", "c", "d"), HOUR, 4)

    clock.now = 3600.0
    store(pool, index, numbered(2))

    assert present(index, "a", "b", "c", "d") == [True, True, False, False]


def test_a_leased_block_that_is_retained_stays_so_after_the_lease() -> None:
    pool, index, _ = a_pool()
    store(pool, index, names("a"))
    lease = pool.match(index, names("a"))
    pool.retain(index, names("a"), HOUR, 4)
    store(pool, index, numbered(50))
    pool.free(lease.blocks)
    store(pool, index, numbered(50, "again"))

    assert present(index, "a") == [True]


def test_a_drop_ends_a_retention_and_frees_its_part_of_the_budget() -> None:
    pool, index, _ = a_pool()
    store(pool, index, names("a"))
    pool.retain(index, names("a"), HOUR, 1)

    pool.drop(index, names("a"))

    assert pool.retained_units() == 0
    assert pool.retain(index, names("b"), HOUR, 1) == 1


def test_pins_and_retentions_do_not_mind_each_other() -> None:
    pool, index, _ = a_pool()
    store(pool, index, names("a"))
    pool.pin(index, names("a"), 4)
    pool.retain(index, names("a"), HOUR, 4)
    pool.unpin(index, names("a"))
    store(pool, index, numbered(50))

    assert present(index, "a") == [True]


def test_only_the_account_that_asked_ends_a_retention() -> None:
    pool, index, _ = a_pool()
    store(pool, index, names("a"))
    pool.retain(index, names("a"), Retention(60.0, account="alice"), 4)

    assert pool.end_retention(index, names("a"), "bob") == 0
    assert pool.end_retention(index, names("a", "b"), "alice") == 1
    assert pool.retained_units() == 0


def test_a_block_of_two_accounts_counts_for_both_and_once_for_their_owner() -> None:
    pool, index, _ = a_pool()
    pool.retain(index, names("a"), Retention(60.0, account="alice", account_units=1), 2)

    assert pool.retain(index, names("a"), Retention(30.0, account="bob", account_units=0), 2) == 0
    assert pool.retain(index, names("a", "b"), Retention(90.0, account="bob", account_units=1), 2) == 1
    assert pool.retained_units() == 1
    assert pool.retain(index, names("b"), Retention(60.0, account="alice", account_units=2), 2) == 1
    assert pool.retained_units() == 2


def test_one_account_never_ends_what_another_was_granted() -> None:
    pool, index, clock = a_pool()
    store(pool, index, names("a"))
    pool.retain(index, names("a"), Retention(3600.0, 10, "alice"), 4)
    pool.retain(index, names("a"), Retention(60.0, 11, "bob"), 4)

    assert pool.end_retention(index, names("a"), "bob") == 1
    store(pool, index, numbered(50))
    assert present(index, "a") == [True]

    pool.retain(index, names("a"), Retention(7200.0, 11, "bob", 1), 4)
    pool.retain(index, names("other"), Retention(60.0, 12, "bob", 1), 4)
    store(pool, index, numbered(50, "again"))
    assert present(index, "a") == [True]

    clock.now = 3600.0
    store(pool, index, numbered(50, "later"))
    assert present(index, "a") == [False]


def test_a_block_is_retained_as_long_as_any_account_has_it() -> None:
    pool, index, clock = a_pool()
    store(pool, index, names("a"))
    pool.retain(index, names("a"), Retention(60.0, account="alice"), 4)
    pool.retain(index, names("a"), Retention(90.0, account="bob"), 4)

    clock.now = 60.0
    store(pool, index, numbered(50))
    assert present(index, "a") == [True]
    assert pool.retained_units() == 1

    clock.now = 90.0
    store(pool, index, numbered(50, "later"))
    assert present(index, "a") == [False]
    assert pool.retained_units() == 0


def test_no_more_than_a_bounded_number_of_accounts_retain_one_block() -> None:
    pool, index, _ = a_pool()
    granted = [pool.retain(index, names("a"), Retention(60.0, account=f"{number}"), 4) for number in range(100)]

    assert granted == [1] * 64 + [0] * 36
    assert pool.retained_units() == 1


def test_of_a_prompt_that_makes_place_the_end_goes_first() -> None:
    pool, index, _ = a_pool()
    pool.retain(index, names("a", "b", "c"), Retention(60.0, 10), 4)
    pool.retain(index, names("d"), Retention(60.0, 10), 4)

    assert pool.retain(index, names("x", "y"), Retention(60.0, 90), 4) == 2

    assert [pool.end_retention(index, [block_hash], "") for block_hash in names("a", "b", "c", "d")] == [1, 0, 0, 1]


def test_blocks_leave_a_pin_in_the_order_of_their_prompt() -> None:
    pool, index, _ = a_pool(4)
    store(pool, index, names("a", "b", "c", "d"))
    pool.pin(index, names("a", "b", "c", "d"), 4)
    pool.unpin(index, names("a", "b", "c", "d"))

    store(pool, index, numbered(2))

    assert present(index, "a", "b", "c", "d") == [True, True, False, False]


def test_within_shares_nobody_loses_what_is_retained_of_his_own() -> None:
    clock = Clock()
    pool = BlockPool(8, FairPolicy(LruPolicy), clock=clock)
    alice, bob = PrefixIndex(1, Share("alice", 4)), PrefixIndex(1, Share("bob", 4))
    store(pool, alice, names("a", "b"))
    pool.retain(alice, names("a"), HOUR, 2)

    store(pool, bob, numbered(100))
    store(pool, alice, numbered(100, "hers"))

    assert present(alice, "a", "b") == [True, False]
    assert pool.retained_units(alice.share) == 1
    assert pool.retained_units(bob.share) == 0


def test_retentions_that_come_and_go_leave_nothing_behind() -> None:
    pool, index, clock = a_pool()
    for _ in range(5000):
        pool.retain(index, names("a", "b"), Retention(MAX_TTL_S), 4)
        pool.end_retention(index, names("a", "b"), "")
    policy = pool._retained
    assert policy is not None
    assert len(policy._wakes) < 3000

    clock.now = 1.0
    pool.reserve(index, names("c"))

    assert pool._retained is None


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.nan, math.inf, MAX_TTL_S + 1.0])
def test_a_time_out_of_range_is_refused(ttl_s: float) -> None:
    with pytest.raises(ConfigError, match="ttl_s must be"):
        Retention(ttl_s)


@pytest.mark.parametrize("priority", [0, -5, 101])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(ConfigError, match="priority must be"):
        Retention(60.0, priority)
