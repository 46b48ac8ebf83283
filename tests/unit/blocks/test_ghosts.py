"""What was evicted not long ago: remembered within a bound, never mistaken for what was not."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.block import PrefixIndex
from kvtier.blocks.ghosts import MAX_GHOSTS, Ghosts, scope_of
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.pool import BlockPool


def name(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


@given(st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.integers(0, 5)), max_size=30))
def test_a_few_are_remembered_exactly(calls: list[tuple[str, int]]) -> None:
    ghosts, model = Ghosts(), set[int]()
    for act, number in calls:
        getattr(ghosts, act)(name(number))
        getattr(model, act)(number)

    assert {number for number in range(6) if ghosts.has(name(number))} == model


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(1, 64))
def test_the_newest_is_always_remembered_and_never_more_than_asked(numbers: list[int], max_hashes: int) -> None:
    ghosts = Ghosts(max_hashes)
    for number in numbers:
        ghosts.add(name(number))
        assert ghosts.has(name(number))

    assert sum(ghosts.has(name(number)) for number in range(1001)) <= max(8, max_hashes)
    assert not any(ghosts.has(name(number)) for number in set(range(1001)) - set(numbers))


def test_a_hash_that_is_discarded_is_gone_however_often_it_was_evicted() -> None:
    ghosts = Ghosts(8)
    for _ in range(20):
        ghosts.add(name(1))

    ghosts.discard(name(1))

    assert not ghosts.has(name(1))


def test_memory_is_eight_bytes_a_hash_and_none_before_the_first() -> None:
    ghosts = Ghosts()
    assert ghosts.nbytes == 0
    for number in range(20_000):
        ghosts.add(name(number))

    assert ghosts.nbytes == 8 * MAX_GHOSTS == 2 << 20
    assert all(ghosts.has(name(number)) for number in range(19_000, 20_000))
    ghosts.clear()
    assert (ghosts.nbytes, ghosts.has(name(19_999))) == (0, False)


def test_the_ending_of_a_match_tells_evicted_from_never_stored() -> None:
    ghosts = Ghosts()
    pool, index = BlockPool(2, on_evict=lambda block: ghosts.add(block.hash)), PrefixIndex(1)

    def store(*numbers: int) -> None:
        grant = pool.reserve(index, [name(number) for number in numbers])
        pool.commit(grant.blocks)
        pool.free(grant.blocks)

    def ending(*numbers: int) -> str:
        hashes = [name(number) for number in numbers]
        match = pool.match(index, hashes)
        pool.free(match.blocks)
        return ghosts.ending(match, hashes)

    store(1, 2)
    assert (ending(1, 2), ending(1, 2, 3), ending()) == (MatchEnd.ALL, MatchEnd.NEVER_STORED, MatchEnd.ALL)
    store(3)
    assert (ending(1, 2), ending(1), ending(4)) == (MatchEnd.EVICTED, MatchEnd.ALL, MatchEnd.NEVER_STORED)


def test_a_namespace_of_the_same_bytes_as_a_hash_tells_nothing_of_others() -> None:
    first, second = name(1), name(2)
    ghosts = Ghosts()
    ghosts.add(first, scope_of(first))
    ghosts.add(first, scope_of(second))

    assert ghosts.has(first, scope_of(first))
    assert ghosts.has(first, scope_of(second))
    assert not ghosts.has(second, scope_of(second))
    assert not ghosts.has(second, scope_of(first))
