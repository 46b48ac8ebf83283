"""The record of prompts: the place it reports is the longest common beginning, and it keeps its bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.parting.record import (
    SEGMENT_TOKENS,
    PromptRecord,
    RecordBounds,
    TokenArray,
    common_length,
    scope_key,
    segment_keys,
    token_array,
)

SCOPE = scope_key("")
_HEADS = [list(range(number, number + 3 * SEGMENT_TOKENS)) for number in range(2)]


def array(tokens: Sequence[int]) -> TokenArray:
    found = token_array(tokens)
    assert found is not None
    return found


def add(record: PromptRecord, tokens: Sequence[int], *, scope: bytes = SCOPE, session: bytes = b"") -> int | None:
    made = array(tokens)
    return record.add(scope, session, made, segment_keys(scope, made))


def nearest(
    record: PromptRecord, tokens: Sequence[int], *, scope: bytes = SCOPE, session: bytes = b""
) -> tuple[int, int, bool] | None:
    made = array(tokens)
    found = record.nearest(scope, session, made, segment_keys(scope, made))
    return None if found is None else (found.prompt.number, found.num_common, found.same_session)


def naive_common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A part of one of two heads and a short tail: many begin alike, around the ends of segments too."""
    head = draw(st.sampled_from(_HEADS))
    near = [0, 1, SEGMENT_TOKENS - 1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1, 2 * SEGMENT_TOKENS, len(head)]
    length = draw(st.sampled_from(near) | st.integers(0, len(head)))
    return head[:length] + draw(st.lists(st.integers(0, 3), max_size=4))


# --- where prompts part ---------------------------------------------------------------------------------------------


@given(st.lists(prompts(), min_size=1, max_size=8), prompts())
@settings(deadline=None)
def test_the_reported_place_is_the_longest_common_beginning(recorded: list[list[int]], asked: list[int]) -> None:
    record = PromptRecord()
    for tokens in recorded:
        add(record, tokens)

    found = nearest(record, asked)

    assert found is not None
    assert found[1] == max(naive_common(tokens, asked) for tokens in recorded)
    assert naive_common(recorded[found[0] - 1], asked) == found[1]


@given(st.lists(prompts(), min_size=1, max_size=6), st.lists(st.integers(0, 3), max_size=300), prompts())
@settings(deadline=None)
def test_an_answer_belongs_to_its_prompt(recorded: list[list[int]], answer: list[int], asked: list[int]) -> None:
    record = PromptRecord()
    numbers = [add(record, tokens) for tokens in recorded]
    assert numbers[0] is not None
    record.extend(numbers[0], array(answer))

    found = nearest(record, asked)

    assert found is not None
    assert found[1] == max(naive_common(tokens, asked) for tokens in [recorded[0] + answer, *recorded[1:]])


@given(prompts(), prompts())
def test_arrays_are_compared_as_lists_are(left: list[int], right: list[int]) -> None:
    assert common_length(array(left), array(right)) == naive_common(left, right)


def test_long_arrays_are_compared_to_their_end() -> None:
    long = np.arange(100_000, dtype=np.uint32)
    other = long.copy()
    other[99_999] = 0

    assert common_length(long, other) == 99_999
    assert common_length(long, long[:70_000]) == 70_000


def test_a_session_is_compared_with_itself_and_a_new_one_with_all() -> None:
    record, session = PromptRecord(), scope_key("", "mine")
    add(record, [1, 2, 3, 4, 5])
    assert nearest(record, [1, 2, 3, 4, 9], session=session) == (1, 4, False)

    add(record, [1, 2, 7], session=session)

    assert nearest(record, [1, 2, 3, 4, 9], session=session) == (2, 2, True)
    assert nearest(record, [1, 2, 3, 4, 9]) == (1, 4, False)


def test_of_equal_ones_the_newest_is_the_nearest() -> None:
    record = PromptRecord()
    for _ in range(3):
        add(record, [1, 2, 3])

    assert nearest(record, [1, 2, 4]) == (3, 2, False)


def test_prompts_of_one_salt_are_never_compared_with_those_of_another() -> None:
    record = PromptRecord()
    long = list(range(3 * SEGMENT_TOKENS))
    add(record, long, scope=scope_key("one"), session=scope_key("one", "s"))

    assert nearest(record, long, scope=scope_key("other"), session=scope_key("other", "s")) is None
    assert nearest(record, long) is None
    assert nearest(record, long, scope=scope_key("one")) == (1, len(long), False)


def test_what_can_be_no_token_ids_has_no_array() -> None:
    assert token_array([-1]) is None
    assert token_array([1 << 40]) is None
    assert token_array(["text"]) is None  # type: ignore[list-item]


# --- bounds ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(prompts(), st.integers(0, 4), st.integers(0, 2), st.lists(st.integers(0, 3), max_size=300)),
        max_size=24,
    )
)
@settings(deadline=None)
def test_the_record_keeps_its_bounds_and_counts_its_bytes(
    traffic: list[tuple[list[int], int, int, list[int]]],
) -> None:
    bounds = RecordBounds(num_prompts=5, num_bytes=12_000, num_sessions=2)
    record = PromptRecord(bounds)
    for tokens, session, salt, answer in traffic:
        scope = scope_key(str(salt))
        key = scope_key(str(salt), str(session)) if session else b""
        number = add(record, tokens, scope=scope, session=key)
        if number is not None:
            record.extend(number, array(answer))

        kept = [found for number in range(1, 60) if (found := record.get(number)) is not None]
        assert len(record) == len(kept) <= bounds.num_prompts
        assert record.num_bytes == sum(prompt.nbytes for prompt in kept) <= bounds.num_bytes
        assert record.num_sessions <= bounds.num_sessions
    for number in range(1, 60):
        record.remove(number)
    assert (len(record), record.num_bytes) == (0, 0)
    assert nearest(record, _HEADS[0], scope=scope_key("0")) is None


def test_a_prompt_that_is_larger_than_the_record_is_not_kept() -> None:
    record = PromptRecord(RecordBounds(num_bytes=5_000))
    number = add(record, [1, 2])
    assert add(record, list(range(2_000))) is None
    assert nearest(record, [1, 3]) == (1, 1, False)

    assert number is not None
    record.extend(number, array(list(range(2_000))))
    assert len(record) == 0


def test_a_long_session_keeps_its_last_prompts_only() -> None:
    record, session = PromptRecord(), scope_key("", "s")
    for number in range(20):
        add(record, [number, 1], session=session)

    assert len(record) == 4
    assert nearest(record, [19, 5], session=session) == (20, 1, True)
    assert nearest(record, [2, 1]) == (20, 0, False)


def test_a_conversation_that_goes_on_is_kept_once() -> None:
    record, tokens, compared_with = PromptRecord(), [1, 2, 3], None
    for turn in range(10):
        made = array(tokens)
        number = record.add(SCOPE, b"", made, segment_keys(SCOPE, made), (), compared_with)
        assert number is not None
        record.extend(number, array([turn] * 100))
        tokens, compared_with = [*tokens, *[turn] * 100, 7], number

    assert len(record) == 1
    assert nearest(record, tokens) == (10, len(tokens) - 1, False)


def test_a_prompt_that_is_repeated_is_kept_once() -> None:
    record = PromptRecord()
    first, second = add(record, [1, 2, 3]), None
    assert first is not None
    record.extend(first, array([4, 5]))
    made = array([1, 2, 3])
    second = record.add(SCOPE, b"", made, segment_keys(SCOPE, made), (), first)
    assert second is not None
    record.extend(second, array([4, 5]))

    assert len(record) == 1
