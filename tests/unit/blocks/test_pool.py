"""Who holds which block: reference counts, the prefix index, eviction."""

from __future__ import annotations

import pytest

from kvtier.blocks.block import Block, PrefixIndex, Presence
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.pool import BlockPool


def names(*texts: str) -> list[BlockHash]:
    return [BlockHash(text.encode().ljust(32, b"\0")) for text in texts]


def store(pool: BlockPool, index: PrefixIndex, *texts: str) -> list[Block]:
    """READY blocks that nobody references."""
    grant = pool.reserve(index, names(*texts))
    assert pool.commit(grant.blocks) == len(texts)
    pool.free(grant.blocks)
    return grant.blocks


def present(index: PrefixIndex, *texts: str) -> list[bool]:
    return [index.presence(block_hash) is Presence.READY for block_hash in names(*texts)]


# --- reserve and commit --------------------------------------------------------------------------------------------


def test_a_reserved_block_is_pending_and_matches_for_nobody() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    grant = pool.reserve(index, names("a"))

    match = pool.match(index, names("a"))

    assert (grant.positions, grant.num_ready, grant.num_pending, grant.num_refused) == ([0], 0, 0, 0)
    assert (match.blocks, match.ended) == ([], Presence.PENDING)
    assert index.presence(names("a")[0]) is Presence.PENDING


def test_a_committed_block_is_ready_for_everyone() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    grant = pool.reserve(index, names("a"))

    assert pool.commit(grant.blocks) == 1
    assert pool.commit(grant.blocks) == 0
    assert pool.match(index, names("a")).blocks == grant.blocks


def test_what_is_there_or_on_its_way_is_not_reserved_again() -> None:
    pool, index = BlockPool(8), PrefixIndex(1)
    store(pool, index, "ready")
    pool.reserve(index, names("pending"))

    grant = pool.reserve(index, names("ready", "new", "pending", "newer"))

    assert (grant.positions, grant.num_ready, grant.num_pending, grant.num_refused) == ([1, 3], 1, 1, 0)
    assert [block.hash for block in grant.blocks] == names("new", "newer")


def test_a_hash_named_twice_gets_one_block() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)

    grant = pool.reserve(index, names("a", "b", "a"))

    assert grant.positions == [0, 1]
    assert pool.free_units == 2


def test_the_first_ones_win_when_room_is_short() -> None:
    pool, index = BlockPool(2), PrefixIndex(1)

    grant = pool.reserve(index, names("a", "b", "c", "d"))

    assert (grant.positions, grant.num_refused) == ([0, 1], 2)


def test_a_limit_bounds_what_is_reserved() -> None:
    pool, index = BlockPool(8), PrefixIndex(1)

    grant = pool.reserve(index, names("a", "b", "c"), max_blocks=1)

    assert (grant.positions, grant.num_refused) == ([0], 2)
    assert pool.reserve(index, names("b"), max_blocks=0).num_refused == 1


def test_a_writer_that_gives_up_leaves_nothing() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    grant = pool.reserve(index, names("a", "b"))

    pool.free(grant.blocks)

    assert pool.free_units == 4
    assert len(index) == 0
    assert pool.match(index, names("a")).ended is Presence.MISS


def test_a_block_too_large_for_the_pool_evicts_nothing() -> None:
    pool, small, large = BlockPool(4), PrefixIndex(1), PrefixIndex(5)
    store(pool, small, "a", "b", "c", "d")

    assert pool.reserve(large, names("x")).num_refused == 1
    assert present(small, "a", "b", "c", "d") == [True] * 4


# --- match and free ------------------------------------------------------------------------------------------------


def test_a_match_ends_at_the_first_block_that_is_missing() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    a, b, _ = store(pool, index, "a", "b", "d")

    match = pool.match(index, names("a", "b", "c", "d"))

    assert (match.blocks, match.ended) == ([a, b], Presence.MISS)


def test_a_match_takes_no_more_than_its_limit() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    a, *_ = store(pool, index, "a", "b", "c")

    match = pool.match(index, names("a", "b", "c"), max_blocks=1)

    assert (match.blocks, match.ended) == ([a], Presence.READY)
    assert pool.referenced_units == 1


def test_each_index_has_its_own_blocks() -> None:
    pool, one, other = BlockPool(4), PrefixIndex(1), PrefixIndex(1)
    store(pool, one, "a")

    assert pool.match(other, names("a")).ended is Presence.MISS


def test_references_are_counted_one_by_one() -> None:
    pool, index = BlockPool(4), PrefixIndex(2)
    store(pool, index, "a")
    first = pool.match(index, names("a")).blocks
    pool.reference(first)
    second = pool.match(index, names("a")).blocks
    counts = [pool.referenced_units]
    for held in (first, first, second):
        pool.free(held)
        counts.append(pool.referenced_units)

    assert counts == [2, 2, 2, 0]


def test_a_reference_returned_twice_is_a_bug_that_shows() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    blocks = store(pool, index, "a")

    with pytest.raises(AssertionError, match="returned twice"):
        pool.free(blocks)


# --- eviction ------------------------------------------------------------------------------------------------------


def test_the_coldest_block_makes_room() -> None:
    pool, index = BlockPool(3), PrefixIndex(1)
    for text in ("a", "b", "c"):
        store(pool, index, text)
    pool.free(pool.match(index, names("a")).blocks)

    store(pool, index, "d")

    assert present(index, "a", "b", "c", "d") == [True, False, True, True]
    assert pool.num_evicted == 1


def test_a_prefix_loses_its_end_first() -> None:
    pool, index = BlockPool(3), PrefixIndex(1)
    store(pool, index, "a", "b", "c")

    store(pool, index, "x")

    assert present(index, "a", "b", "c") == [True, True, False]


def test_a_touched_block_is_the_last_to_go() -> None:
    pool, index = BlockPool(2), PrefixIndex(1)
    old = store(pool, index, "old")
    store(pool, index, "new")

    pool.touch(old)
    store(pool, index, "x")

    assert present(index, "old", "new") == [True, False]


def test_a_referenced_block_is_never_evicted() -> None:
    pool, index = BlockPool(2), PrefixIndex(1)
    store(pool, index, "a", "b")
    held = pool.match(index, names("a")).blocks

    grant = pool.reserve(index, names("x", "y"))

    assert grant.num_refused == 1
    assert present(index, "a", "b") == [True, False]
    assert held[0].num_refs == 1


def test_a_pending_block_is_never_evicted() -> None:
    pool, index = BlockPool(1), PrefixIndex(1)
    pool.reserve(index, names("a"))

    assert pool.reserve(index, names("b")).num_refused == 1


def test_a_prompts_own_blocks_do_not_make_room_for_its_others() -> None:
    pool, index = BlockPool(2), PrefixIndex(1)
    store(pool, index, "a", "b")

    grant = pool.reserve(index, names("a", "b", "c"))

    assert (grant.num_ready, grant.num_refused) == (2, 1)
    assert present(index, "a", "b") == [True, True]


def test_a_large_block_takes_the_place_of_neighbouring_small_ones() -> None:
    pool, small, large = BlockPool(8), PrefixIndex(1), PrefixIndex(4)
    for text in "abcdefgh":
        store(pool, small, text)

    grant = pool.reserve(large, names("x"))

    assert len(grant.blocks) == 1
    assert pool.num_evicted == 4


def test_several_large_blocks_take_the_place_of_as_many_small_ones_as_they_need() -> None:
    pool, small, large = BlockPool(8), PrefixIndex(1), PrefixIndex(4)
    for text in "abcdefgh":
        store(pool, small, text)

    assert len(pool.reserve(large, names("x", "y")).blocks) == 2


def test_small_blocks_around_a_held_one_are_left_alone_when_they_cannot_help() -> None:
    pool, small, large = BlockPool(4), PrefixIndex(1), PrefixIndex(3)
    for text in "abcd":
        store(pool, small, text)
    pool.match(small, names("b"))

    assert pool.reserve(large, names("x")).num_refused == 1
    assert present(small, "a", "b", "c", "d") == [True] * 4
    store(pool, small, "e")
    assert present(small, "a", "c", "d") == [False, True, True]


def test_room_of_one_size_serves_another() -> None:
    pool, small, large = BlockPool(6), PrefixIndex(1), PrefixIndex(3)
    store(pool, large, "x", "y")

    grant = pool.reserve(small, names("a", "b", "c", "d"))

    assert len(grant.blocks) == 4
    assert len(large) == 0


# --- drop, pin -----------------------------------------------------------------------------------------------------


def test_a_dropped_block_is_gone_and_its_room_is_back() -> None:
    pool, index = BlockPool(2), PrefixIndex(2)
    store(pool, index, "a")

    assert pool.drop(index, names("a", "unknown")) == 1
    assert (pool.free_units, len(index)) == (2, 0)


def test_a_dropped_block_keeps_its_room_until_its_last_reference_returns() -> None:
    pool, index = BlockPool(1), PrefixIndex(1)
    store(pool, index, "a")
    held = pool.match(index, names("a")).blocks

    pool.drop(index, names("a"))

    assert present(index, "a") == [False]
    assert pool.reserve(index, names("b")).num_refused == 1
    pool.free(held)
    assert pool.free_units == 1


def test_a_block_dropped_while_it_was_written_stays_gone() -> None:
    pool, index = BlockPool(1), PrefixIndex(1)
    grant = pool.reserve(index, names("a"))
    pool.drop(index, names("a"))

    assert pool.commit(grant.blocks) == 0
    pool.free(grant.blocks)
    assert (pool.free_units, present(index, "a")) == (1, [False])


def test_a_hash_dropped_under_a_reader_can_be_written_anew() -> None:
    pool, index = BlockPool(2), PrefixIndex(1)
    store(pool, index, "a")
    old = pool.match(index, names("a")).blocks
    pool.drop(index, names("a"))

    new = store(pool, index, "a")
    pool.free(old)

    assert new[0] is not old[0]
    assert pool.match(index, names("a")).blocks == new


def test_a_pinned_block_survives_any_flood() -> None:
    pool, index = BlockPool(2), PrefixIndex(1)
    store(pool, index, "kept")

    assert pool.pin(index, names("kept"), max_units=2) == 1
    for text in "abcde":
        store(pool, index, text)

    assert present(index, "kept") == [True]
    assert pool.pinned_units == 1


def test_an_unpinned_block_may_go() -> None:
    pool, index = BlockPool(1), PrefixIndex(1)
    store(pool, index, "a")
    pool.pin(index, names("a"), max_units=1)

    assert pool.unpin(index, names("a", "unknown")) == 1
    store(pool, index, "b")

    assert present(index, "a", "b") == [False, True]
    assert pool.pinned_units == 0


def test_the_leading_blocks_are_pinned_up_to_the_limit() -> None:
    pool, index = BlockPool(8), PrefixIndex(2)
    store(pool, index, "a", "b", "c")

    assert pool.pin(index, names("a", "b", "c"), max_units=5) == 2
    assert [index.blocks[block_hash].is_pinned for block_hash in names("a", "b", "c")] == [True, True, False]


def test_pinning_twice_counts_once() -> None:
    pool, index = BlockPool(4), PrefixIndex(2)
    store(pool, index, "a")

    assert [pool.pin(index, names("a"), max_units=2) for _ in range(2)] == [1, 1]
    assert pool.pinned_units == 2
    assert pool.unpin(index, names("a")) == 1
    assert pool.unpin(index, names("a")) == 0


def test_a_pending_block_is_not_pinned() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    pool.reserve(index, names("a"))

    assert pool.pin(index, names("a"), max_units=4) == 0


def test_a_dropped_block_is_not_pinned_any_more() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    store(pool, index, "a")
    pool.pin(index, names("a"), max_units=4)

    pool.drop(index, names("a"))

    assert (pool.pinned_units, pool.free_units) == (0, 4)


# --- more and less room --------------------------------------------------------------------------------------------


def test_a_pool_that_shrinks_evicts_what_lies_at_its_end() -> None:
    gone: list[Block] = []
    pool, index = BlockPool(6, on_evict=gone.append), PrefixIndex(2)
    blocks = store(pool, index, "a", "b", "c")

    assert pool.shrink(3)

    assert (pool.num_units, pool.free_units) == (3, 1)
    assert gone == [blocks[2], blocks[1]]
    assert present(index, "a", "b", "c") == [True, False, False]
    pool.extend(3)
    assert len(pool.reserve(index, names("d", "e")).blocks) == 2


def test_a_pool_whose_end_is_in_use_does_not_shrink() -> None:
    pool, index = BlockPool(3), PrefixIndex(1)
    store(pool, index, "a", "b", "c")
    lent = pool.match(index, names("c")).blocks

    assert not pool.shrink(2)
    assert present(index, "a", "b", "c") == [True, True, True]
    pool.free(lent)
    assert pool.pin(index, names("b"), 1) == 1
    assert not pool.shrink(2)
    assert pool.shrink(1)
    assert present(index, "a", "b", "c") == [True, True, False]


def test_evict_takes_the_coldest_that_may_go() -> None:
    pool, index = BlockPool(4), PrefixIndex(1)
    coldest, *_ = store(pool, index, "d")
    store(pool, index, "a", "b", "c")
    pool.hold(coldest)
    lent = pool.match(index, names("c")).blocks

    pool.evict(1)
    assert present(index, "a", "b", "c", "d") == [True, False, True, True], "of a prompt, the end goes first"
    pool.evict(5)
    assert present(index, "a", "b", "c", "d") == [False, False, True, True]
    pool.let_go(coldest)
    pool.evict(1)
    assert present(index, "c", "d") == [True, False]
    pool.free(lent)
