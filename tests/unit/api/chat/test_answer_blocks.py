"""The blocks of an answer, however its text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.chat.answer_blocks import AnswerBlocks, BlockBegins, BlockEnds, BlockEvent, BlockGrows

_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
_FORM = AnswerForm("hermes", ("add",), splits_reasoning=True)
_ANSWERS = {
    "": [("text", "")],
    "  ": [("text", "  ")],
    "Hello there": [("text", "Hello there")],
    " Hello": [("text", " Hello")],
    "<think>\nHm.\n</think>\n\nHello": [("reasoning", "Hm."), ("text", "Hello")],
    f"<think>Hm.</think>\n\n{_CALL}\n": [("reasoning", "Hm."), ("call", '{"a": 1}')],
    f"I add.\n{_CALL}\n{_CALL}": [("text", "I add."), ("call", '{"a": 1}'), ("call", '{"a": 1}')],
    f"{_CALL}\nDone": [("call", '{"a": 1}'), ("text", "Done")],
}


def _replayed(events: list[BlockEvent]) -> list[tuple[str, str]]:
    """The blocks as a client joins them; one block at a time is open, and ends."""
    found: list[tuple[str, str]] = []
    is_open = False
    for event in events:
        if isinstance(event, BlockBegins):
            assert not is_open
            is_open = True
            found.append((event.block.kind, ""))
        else:
            assert is_open
            assert event.block.index == len(found) - 1
            if isinstance(event, BlockGrows):
                assert event.text
                found[-1] = (found[-1][0], found[-1][1] + event.text)
            is_open = not isinstance(event, BlockEnds)
    assert not is_open
    return found


@pytest.mark.parametrize("text", _ANSWERS)
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_the_blocks_of_an_answer_do_not_depend_on_its_cuts(text: str, cuts: list[int]) -> None:
    blocks = AnswerBlocks(_FORM)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    events: list[BlockEvent] = []
    for start, end in zip([0, *ends], ends, strict=False):
        events += blocks.push(text[start:end], 1)
    events += blocks.finish()

    assert _replayed(events) == _ANSWERS[text]
    assert [(one.kind, one.text) for one in blocks.blocks] == _ANSWERS[text]


def test_tokens_of_a_thought_are_counted_and_others_are_not() -> None:
    blocks = AnswerBlocks(_FORM)
    for token in ("<think>", "Hm", ".", "</think>", "\n\n", "Hello", " there"):
        blocks.push(token, 1)
    blocks.finish()

    assert blocks.num_reasoning_tokens == 4


def test_marks_are_text_where_nobody_looks_for_them() -> None:
    blocks = AnswerBlocks(PLAIN)
    blocks.push(_CALL, 1)
    blocks.finish()

    assert [(one.kind, one.text) for one in blocks.blocks] == [("text", _CALL)]


def test_a_thought_that_the_prompt_began_is_one() -> None:
    blocks = AnswerBlocks(_FORM, "<|im_start|>assistant\n<think>\n")
    blocks.push("Hm.\n</think>\n\nHello", 3)
    blocks.finish()

    assert [(one.kind, one.text) for one in blocks.blocks] == [("reasoning", "Hm."), ("text", "Hello")]
