"""Places say where each part of a block lies in pages of any size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.transfer.places import places_of


@pytest.mark.parametrize(
    ("page_tokens", "blocks", "expected"),
    [
        (16, [2, 0], [5, 9]),
        (32, [0, 1, 2], [18, 19, 14]),
        (8, [0, 1], [9, 7, 5, 3]),
        (16, [], []),
    ],
)
def test_places_are_numbered_through_all_pages(page_tokens: int, blocks: list[int], expected: list[int]) -> None:
    assert places_of([9, 7, 5, 3], blocks, page_tokens=page_tokens, block_tokens=16) == expected


@given(st.permutations(range(12)), st.integers(0, 4), st.integers(0, 4))
def test_parts_of_all_blocks_are_all_parts_of_their_pages(pages: list[int], page_power: int, block_power: int) -> None:
    page_tokens, block_tokens = 1 << page_power, 1 << block_power
    blocks = range(len(pages) * page_tokens // block_tokens)

    places = places_of(pages, blocks, page_tokens=page_tokens, block_tokens=block_tokens)

    part_tokens = min(page_tokens, block_tokens)
    num_used = len(blocks) * block_tokens // page_tokens
    per_page = page_tokens // part_tokens
    assert places == [page * per_page + part for page in pages[:num_used] for part in range(per_page)]


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 12), st.integers(0, 12))
def test_a_run_of_blocks_has_the_places_of_its_blocks(page_power: int, block_power: int, first: int, end: int) -> None:
    page_tokens, block_tokens = 1 << page_power, 1 << block_power
    pages = list(range(100, 100 + 12 * block_tokens // page_tokens + 1))

    run, listed = (
        places_of(pages, blocks, page_tokens=page_tokens, block_tokens=block_tokens)
        for blocks in (range(first, end), list(range(first, end)))
    )

    assert run == listed


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ([-1], "no such block"),
        ([2], "the pages end before the blocks"),
        (range(-1, 1), "no such block"),
        (range(1, 3), "the pages end before the blocks"),
    ],
)
def test_blocks_outside_the_pages_have_no_places(blocks: Sequence[int], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        places_of([4, 5], blocks, page_tokens=16, block_tokens=16)
