"""One ranking of why a block is missing, for tiers, servers and flags alike."""

from __future__ import annotations

import itertools

import pytest

from kvtier.blocks.match_end import MatchEnd, most_telling

RANKING = [
    MatchEnd.LIMIT,
    MatchEnd.PENDING,
    MatchEnd.LOST,
    MatchEnd.TIER_DOWN,
    MatchEnd.EVICTED,
    MatchEnd.NEVER_STORED,
]


@pytest.mark.parametrize(("more", "less"), list(itertools.combinations(RANKING, 2)))
def test_of_two_answers_the_one_closer_to_a_hit_explains_the_miss(more: MatchEnd, less: MatchEnd) -> None:
    assert most_telling([more, less]) is more
    assert most_telling([less, more]) is more


def test_a_damaged_block_is_told_from_one_that_was_never_stored() -> None:
    assert most_telling([MatchEnd.NEVER_STORED, MatchEnd.LOST]) is MatchEnd.LOST


def test_a_tier_that_found_all_of_its_share_explains_no_miss() -> None:
    assert most_telling([MatchEnd.ALL, MatchEnd.EVICTED]) is MatchEnd.EVICTED
    assert most_telling([MatchEnd.ALL]) is MatchEnd.NEVER_STORED
    assert most_telling([]) is MatchEnd.NEVER_STORED


def test_a_printed_end_is_its_word_for_people() -> None:
    assert f"{MatchEnd.ALL}, {MatchEnd.TIER_DOWN}" == "all, tier down"
