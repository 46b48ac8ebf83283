"""The finish reason of answers with calls, streamed and whole."""

from __future__ import annotations

import pytest

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.answer_readers import AnswerReaders
from kvtier.api.generation import WholeAnswer
from kvtier.engine.answer import Completion, StreamPiece

_FORM = AnswerForm("hermes", ("add",))
_CALL = '<tool_call>\n{"name": "add", "arguments": {"place": "Oslo", "days": 3}}\n</tool_call>'
_CUT = _CALL[: _CALL.index("days")]


def _completion(reason: str, stop: str | None) -> Completion:
    return Completion(0, [0], "", reason, None, 0.01, 0.01, {}, stop)


def _reasons(text: str, reason: str, stop: str | None) -> set[str | None]:
    completion = _completion(reason, stop)
    whole, streamed = AnswerReaders(_FORM, 1), AnswerReaders(_FORM, 1)
    last = StreamPiece(0, [0], text[-1:], None, completion)
    answer = WholeAnswer()
    for piece in (*(StreamPiece(0, [0], character) for character in text[:-1]), last):
        streamed.push(0, piece)
        answer.add(piece)
    whole.whole(0, answer)
    return {whole.finish_reason(0, completion), streamed.finish_reason(0, completion)}


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        (_CALL, "stop", None, "tool_calls"),
        (_CALL, "stop", "</tool_call>", "tool_calls"),
        (_CALL + _CUT, "stop", "days", "stop"),
        (_CUT, "stop", "days", "stop"),
        (_CUT, "length", None, "length"),
        ("No call.", "stop", "days", "stop"),
    ],
)
def test_an_answer_that_a_stop_string_ends_within_a_call_ends_with_no_call(
    text: str, reason: str, stop: str | None, expected: str
) -> None:
    assert _reasons(text, reason, stop) == {expected}


def test_an_answer_that_goes_on_has_no_finish_reason() -> None:
    assert AnswerReaders(_FORM, 1).finish_reason(0, None) is None
