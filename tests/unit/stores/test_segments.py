"""A block's place in its prompt: the same for whoever has seen the prompt's beginning, however it comes in parts."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtier.stores.valkey.segments import Place, Segments
from kvtier.stores.valkey.slots import slot_of
from kvtier.testing.tier_contract import chain

HASHES = chain(1, 40)
SEGMENT = 8
NOW_MS = 5000


def expected(position: int) -> Place:
    return Place(HASHES[position // SEGMENT * SEGMENT], position, NOW_MS)


def opened(max_blocks: int = 1000) -> Segments:
    return Segments(SEGMENT, max_blocks, clock=lambda: NOW_MS / 1000)


def test_blocks_of_a_segment_have_its_first_block_for_a_head() -> None:
    assert opened().places(HASHES) == [expected(position) for position in range(40)]


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 20)), max_size=20), st.integers(1, 40))
def test_parts_of_a_prompt_that_was_seen_are_where_they_were(parts: list[tuple[int, int]], num_first: int) -> None:
    segments = opened()
    segments.learn(HASHES[:num_first])
    segments.learn(HASHES)

    for first, count in parts:
        found = segments.places(HASHES[first : first + count])
        assert found == [expected(position) for position in range(first, min(40, first + count))]


def test_prompts_with_a_common_beginning_share_its_places() -> None:
    segments = opened()
    fork = HASHES[:10] + chain(2, 5)
    segments.learn(HASHES)
    segments.learn(fork)

    assert segments.places(fork[:10]) == [expected(position) for position in range(10)]
    assert segments.places(fork[10:]) == [Place(HASHES[8], position, NOW_MS) for position in range(10, 15)]


def test_all_of_a_prompt_counts_from_when_it_was_asked_for() -> None:
    times = iter(range(1, 100))
    segments = Segments(SEGMENT, clock=lambda: next(times))
    segments.learn(HASHES[:20])
    assert {place.asked_ms for place in segments.places(HASHES[:20])} == {1000}

    segments.ask(HASHES[:20])
    asked_ms = segments.places(HASHES[:1])[0].asked_ms
    assert asked_ms > 1000
    segments.learn(HASHES)  # what was computed after it
    assert {place.asked_ms for place in segments.places(HASHES[10:])} == {asked_ms}


def test_what_is_remembered_is_bounded() -> None:
    segments = opened(max_blocks=100)
    dice = random.Random(1)
    for _ in range(50):
        segments.learn(chain(dice.randrange(10_000), 12))

    assert len(segments._places) <= 100
    assert segments.places(HASHES) == [expected(position) for position in range(40)]


def test_slots_are_those_of_the_cluster() -> None:
    assert slot_of(b"123456789") == 0x31C3 % 16384
    assert slot_of(b"") == 0
