"""Which segments of a prompt are offered whole, after some of their blocks were found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash
from kvtier.testing.tier_contract import chain
from kvtier.tiers.tier import SegmentTier
from kvtier.transfer.found_segments import FoundSegments

SIZE = 4
HASHES = chain(1, 40)


class Kept:
    """What a tier says of segments, by number; nothing is known of the others."""

    segment_blocks = SIZE

    def __init__(self, answers: dict[int, bool] | None = None) -> None:
        self._answers = {HASHES[(number + 1) * SIZE - 1]: there for number, there in (answers or {}).items()}

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        return [self._answers.get(name) for name in names]


def found_in(answers: dict[int, bool] | None = None) -> FoundSegments:
    return FoundSegments(cast(SegmentTier, Kept(answers)))


def test_a_segment_that_was_found_in_part_is_due_once_all_of_it_is_full() -> None:
    found = found_in()
    found.note(0, 6)

    assert found.take(HASHES, 6) == []
    assert found.take(HASHES, 7) == []
    assert found.take(HASHES, 9) == [(4, 8)]
    assert found.take(HASHES, 20) == [], "once"


def test_a_segment_of_which_the_end_was_found_is_due_too() -> None:
    found = found_in()
    found.note(6, 13)

    assert found.take(HASHES, 40) == [(4, 8), (12, 16)]


def test_a_segment_that_is_there_or_being_written_is_not_due() -> None:
    found = found_in({1: True})
    found.note(0, 6)

    assert found.take(HASHES, 40) == []


def test_what_was_found_whole_is_due_only_if_the_tier_is_known_to_lack_it_and_a_few_at_a_time() -> None:
    found = found_in(dict.fromkeys((0, 2, 3, 4, 5, 6, 7), False))
    found.note(0, 34)

    assert found.take(HASHES, 40) == [(0, 4), (8, 12), (12, 16), (16, 20), (32, 36)]
    assert found.take(HASHES, 40) == []


def test_without_such_a_tier_or_without_finds_nothing_is_due() -> None:
    nowhere = FoundSegments(None)
    nowhere.note(0, 6)
    assert nowhere.take(HASHES, 40) == []
    found = found_in()
    found.note(0, 0)
    found.note(6, 6)
    assert found.take(HASHES, 40) == []


def test_a_prompt_that_left_its_blocks_offers_nothing() -> None:
    found = found_in()
    found.note(0, 6)
    found.clear()

    assert found.take(HASHES, 40) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6), st.lists(st.integers(0, 40)))
def test_what_is_due_is_whole_full_and_was_found_in_part(runs: list[tuple[int, int]], fulls: list[int]) -> None:
    found = found_in()
    for first, end in runs:
        found.note(first, end)
    taken: list[tuple[int, int]] = []
    for num_full in sorted(fulls):
        due = found.take(HASHES, num_full)
        assert all(end <= num_full for _, end in due)
        taken += due
    assert len(set(taken)) == len(taken)
    for start, end in taken:
        assert start % SIZE == 0
        assert end == start + SIZE
        assert any(first < end and start < last and (first > start or last < end) for first, last in runs)
