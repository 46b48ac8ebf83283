"""Where a prefix can be resumed, against vLLM's rules written down plainly: each kind of layers by itself, in turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.transfer.reach import AttentionKind, Reach, longest_resumable


def test_a_window_reaches_the_tokens_before_the_next_one() -> None:
    reach = Reach(AttentionKind.WINDOW, 16, 64)

    assert [reach.first_block(num_tokens) for num_tokens in (0, 16, 64, 80, 160)] == [0, 0, 0, 1, 6]


def test_a_window_of_one_token_reaches_nothing() -> None:
    assert Reach(AttentionKind.WINDOW, 16, 1).first_block(64) == 4


def test_a_chunk_reaches_its_own_start() -> None:
    reach = Reach(AttentionKind.CHUNK, 16, 64)

    assert [reach.first_block(num_tokens) for num_tokens in (48, 64, 112, 128)] == [0, 4, 4, 8]


def test_a_state_reaches_the_block_that_it_ends() -> None:
    reach = Reach(AttentionKind.STATE, 16)

    assert [reach.first_block(num_tokens) for num_tokens in (0, 16, 160)] == [0, 0, 9]


@pytest.mark.parametrize("attention", [AttentionKind.FULL, AttentionKind.STATE])
def test_only_windows_and_chunks_have_a_span(attention: AttentionKind) -> None:
    with pytest.raises(AssertionError):
        Reach(attention, 16, 64)


def test_what_lies_before_the_first_token_asked_for_need_not_be_present() -> None:
    reach = Reach(AttentionKind.FULL, 16)

    assert longest_resumable([(reach, [False, True, True])], 16, 48) == 0
    assert longest_resumable([(reach, [False, True, True])], 16, 48, first_token=16) == 48


_UNIT = 4
_NUM_BLOCKS = 12
_MAX_TOKENS = _NUM_BLOCKS * _UNIT

_reaches = st.one_of(
    st.builds(Reach, st.just(AttentionKind.FULL), st.sampled_from([2, 4])),
    st.builds(Reach, st.just(AttentionKind.WINDOW), st.sampled_from([2, 4]), st.integers(1, 20)),
    st.builds(Reach, st.just(AttentionKind.CHUNK), st.just(4), st.sampled_from([4, 8, 12, 16])),
    st.builds(Reach, st.just(AttentionKind.STATE), st.just(4)),
)
_groups = st.lists(
    _reaches.flatmap(
        lambda reach: st.tuples(
            st.just(reach),
            st.lists(
                st.booleans(), min_size=_MAX_TOKENS // reach.block_tokens, max_size=_MAX_TOKENS // reach.block_tokens
            ),
        )
    ),
    min_size=1,
    max_size=4,
)


@given(groups=_groups, max_tokens=st.integers(0, _MAX_TOKENS))
def test_it_is_resumed_where_vllm_would_resume_it(groups: list[tuple[Reach, list[bool]]], max_tokens: int) -> None:
    assert longest_resumable(groups, _UNIT, max_tokens) == _by_vllms_rules(groups, max_tokens)


def _by_vllms_rules(groups: Sequence[tuple[Reach, Sequence[bool]]], max_tokens: int) -> int:
    """Each kind shortens the hit to what it has, until all agree."""
    length = max_tokens // _UNIT * _UNIT
    while True:
        agreed = length
        for reach, present in groups:
            agreed = _RULES[reach.attention](reach, present, agreed)
        if agreed == length:
            return length
        length = agreed


def _full(reach: Reach, present: Sequence[bool], max_tokens: int) -> int:
    """As many blocks as are there from the first on."""
    count = 0
    while (count + 1) * reach.block_tokens <= max_tokens and present[count]:
        count += 1
    return count * reach.block_tokens // _UNIT * _UNIT


def _window(reach: Reach, present: Sequence[bool], max_tokens: int) -> int:
    """From the right: so many blocks in a row as the window spans, or all from the first on."""
    needed = -(-(reach.span_tokens - 1) // reach.block_tokens)
    for end in range(max_tokens // reach.block_tokens, 0, -1):
        is_aligned = end * reach.block_tokens % _UNIT == 0
        if is_aligned and all(present[max(0, end - needed) : end]):
            return end * reach.block_tokens
    return 0


def _chunk(reach: Reach, present: Sequence[bool], max_tokens: int) -> int:
    """All chunks before the last are done with; of the last, what is there from its start on."""
    count = max_tokens // reach.span_tokens * reach.span_tokens // reach.block_tokens
    while (count + 1) * reach.block_tokens <= max_tokens and present[count]:
        count += 1
    return count * reach.block_tokens


def _state(reach: Reach, present: Sequence[bool], max_tokens: int) -> int:
    """The last state that is there."""
    for end in range(max_tokens // reach.block_tokens, 0, -1):
        if present[end - 1]:
            return end * reach.block_tokens
    return 0


_RULES = {
    AttentionKind.FULL: _full,
    AttentionKind.WINDOW: _window,
    AttentionKind.CHUNK: _chunk,
    AttentionKind.STATE: _state,
}
