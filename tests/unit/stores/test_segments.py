"""A block's place in its prompt: the same for whoever has seen the prompt's beginning, however it comes in parts."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash
from kvtier.stores.valkey.segments import Place, Segments
from kvtier.stores.valkey.slots import slot_of
from kvtier.testing.tier_contract import chain

HASHES = chain(1, 40)
SEGMENT = 8
NOW_MS = 5000


def expected(position: int) -> Place:
    before = HASHES[position - 1] if position else None
    return Place(HASHES[position // SEGMENT * SEGMENT], position, NOW_MS, before)


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


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 20), st.booleans()), max_size=20))
def test_parts_that_came_first_are_put_right_once_the_beginning_is_seen(parts: list[tuple[int, int, bool]]) -> None:
    segments = opened()
    for first, count, is_told in parts:
        if is_told:
            segments.place(HASHES[first], HASHES[first // SEGMENT * SEGMENT], first)
        segments.complete(HASHES[first : first + count])
    segments.complete(HASHES)

    assert segments.places(HASHES) == [expected(position) for position in range(40)]


def test_parts_follow_only_what_is_known() -> None:
    segments = opened()
    segments.follow(HASHES[3:])
    assert len(segments) == 0

    segments.place(HASHES[3], HASHES[0], 3)
    segments.follow(HASHES[3:])
    assert segments.places(HASHES[4:]) == [expected(position) for position in range(4, 40)]
    assert segments.places(HASHES[3:4]) == [Place(HASHES[0], 3, NOW_MS)], "nobody has said what is before it"


def test_prompts_with_a_common_beginning_share_its_places() -> None:
    segments = opened()
    fork = HASHES[:10] + chain(2, 5)
    segments.learn(HASHES)
    segments.learn(fork)

    assert segments.places(fork[:10]) == [expected(position) for position in range(10)]
    assert segments.places(fork[10:]) == [
        Place(HASHES[8], position, NOW_MS, fork[position - 1]) for position in range(10, 15)
    ]


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


class Seconds:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def asked_s(segments: Segments, hashes: list[BlockHash]) -> set[float]:
    return {place.asked_ms / 1000 for place in segments.places(hashes)}


def test_what_is_asked_for_counts_for_what_precedes_it() -> None:
    clock = Seconds()
    segments = Segments(SEGMENT, clock=clock, renewal_s=60)
    fork = HASHES[:10] + chain(2, 5)
    assert segments.ask(HASHES) == []
    clock.now = 100.0
    segments.learn(fork)
    assert segments.ask(fork[10:]) == fork
    assert asked_s(segments, fork) == {100.0}
    assert asked_s(segments, HASHES[10:]) == {1.0}


def test_what_precedes_is_renewed_now_and_then_and_no_part_counts_from_later_on() -> None:
    clock = Seconds()
    segments = Segments(SEGMENT, clock=clock, renewal_s=60)
    segments.ask(HASHES)
    for clock.now in (2.0, 30.0, 61.0):
        assert segments.ask(HASHES[20:]) == []
    clock.now = 62.0
    assert segments.ask(HASHES[20:25]) == HASHES[:25]
    clock.now = 63.0
    assert segments.ask(HASHES[24:30]) == HASHES[25:30], "as what is before them"
    assert asked_s(segments, HASHES[:30]) == {62.0}
    assert segments.ask(HASHES[:3]) == HASHES[:3], "what nothing precedes counts from now on"


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
