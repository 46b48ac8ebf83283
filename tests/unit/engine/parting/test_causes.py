"""What differs where prompts part: dates, ids, headers, tools in another order; and nothing where nothing is known."""

from __future__ import annotations

import re

import pytest

from kvtier.engine.parting import causes as causes_module
from kvtier.engine.parting.causes import lacks_reasoning, text_causes, tool_causes, tool_marks
from kvtier.tiers.parting import Cause, How, Parting

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds."}}
ADD_TURNED = {"function": {"parameters": {"properties": {}, "type": "object"}, "name": "add"}, "type": "function"}


@pytest.mark.parametrize(
    ("before", "recorded", "now", "expected"),
    [
        ("Today is 2026-11-1", "8.\nBe kind.", "9.\nBe kind.", [Cause.DATE]),
        ("It is 2026-11-18T10:", "17:08Z now", "21:55Z now", [Cause.DATE]),
        ("It is 10:17:0", "8 o'clock", "9 o'clock", [Cause.DATE]),
        ("Today Date: ", "18 Nov 2026\n\nYou", "19 Nov 2026\n\nYou", [Cause.DATE]),
        ("Today Date: ", "November 18, 2026", "December 1, 2026", [Cause.DATE]),
        ("", "Monday, be kind", "Tuesday, be kind", [Cause.DATE]),
        ("now=17951", "23456;", "23511;", [Cause.DATE]),
        ("session 1b4e28ba-2fa1-", "11d2-883f-0016d3cca427 of", "41d2-983f-1016d3cca427 of", [Cause.ID]),
        ("trace ", "9f86d081884c7d65 begins", "60303ae22b998861 begins", [Cause.ID]),
        ("call_", "aB3xY7kLm2Qz9 says", "Zz1xY8kLm2Qa4 says", [Cause.ID]),
        ("Turn ", "9 of many", "10 of many", [Cause.NUMBER]),
        ("x-request-id: ", "aaa\nYou", "bbb\nYou", [Cause.HEADER]),
        ("<s>system\nx-billing-header: v=2; id=", "9f86d081884c7d65;", "60303ae22b998861;", [Cause.HEADER, Cause.ID]),
        ("You are ", "kind to all of them.", "rude to all of them.", []),
        ("", "", "Some text", []),
        (
            "The sky",
            " is blue and wide and very far away",
            " is blue and wide and very far away, so",
            [Cause.SAME_TEXT],
        ),
        ("The sky is ", "blue", "blue", [Cause.SAME_TEXT]),
    ],
)
def test_a_cause_is_what_lies_at_the_place_in_both(before: str, recorded: str, now: str, expected: list[Cause]) -> None:
    assert text_causes(before, recorded, now) == expected
    assert text_causes(before, now, recorded) == expected


def test_a_date_elsewhere_is_no_cause() -> None:
    assert text_causes("Since 2026-11-18 you are ", "kind. It is 10:17.", "rude. It is 10:18.") == []


def test_patterns_are_bounded_and_take_any_text() -> None:
    patterns = [one for one in vars(causes_module).values() if isinstance(one, re.Pattern)]
    assert patterns
    assert not any("*" in one.pattern or "+" in one.pattern for one in patterns)
    for text in ("1" * 10_000, "a-" * 5_000, "A1" * 5_000, "1:" * 5_000, "x-" * 5_000 + ": "):
        assert text_causes(text, text + "a", text + "b") == [Cause.SAME_TEXT]
        assert set(text_causes(text, "1" + text, "2" + text)) <= {Cause.DATE, Cause.ID, Cause.NUMBER, Cause.HEADER}


@pytest.mark.parametrize(
    ("recorded", "now", "expected"),
    [
        ([ADD, FIND], [ADD, FIND], []),
        ([ADD, FIND], [FIND, ADD], [Cause.TOOLS_REORDERED]),
        ([ADD, FIND], [ADD_TURNED, FIND], [Cause.TOOL_KEYS_REORDERED]),
        ([ADD, FIND], [FIND, ADD_TURNED], [Cause.TOOL_KEYS_REORDERED, Cause.TOOLS_REORDERED]),
        ([ADD, FIND], [ADD], [Cause.TOOLS_CHANGED]),
        ([ADD], [], []),
        ([], [ADD], []),
        ([], [], []),
    ],
)
def test_tools_in_another_order_are_told_from_other_tools(
    recorded: list[dict[str, object]], now: list[dict[str, object]], expected: list[Cause]
) -> None:
    assert tool_causes(tool_marks(recorded), tool_marks(now)) == expected


def test_reasoning_that_the_history_lacks_is_seen() -> None:
    assert lacks_reasoning("<think>\nWell, ", "OK")
    assert lacks_reasoning("\n<think>\nWell, ", "OK")
    assert not lacks_reasoning("<think>\nWell, ", "<think>\nNo, ")
    assert not lacks_reasoning("OK", "<think>")


def test_there_is_advice_for_every_cause_and_a_sentence_for_every_way() -> None:
    parting = Parting(how=How.PARTED, token=3, prompt_tokens=9, causes=list(Cause), each_time=True)
    assert len(parting.advice()) == len(Cause) + 1
    assert all(sentence.endswith(".") for sentence in parting.advice())
    sentences = {Parting(how=how, token=3, prompt_tokens=9).sentence() for how in How}
    assert len(sentences) == len(How)


def test_a_sentence_says_message_and_text_as_far_as_they_are_known() -> None:
    found = Parting(how=How.PARTED, token=30, prompt_tokens=90, same_session=True, in_answer=True)
    assert found.sentence() == "The prompt parts from an earlier prompt of its session at token 30, in its answer."
    found = Parting(
        how=How.PARTED, token=30, prompt_tokens=90, message=3, role="assistant", recorded="<think>", now="OK"
    )
    assert found.sentence() == (
        "The prompt parts from a recorded prompt at token 30, in message 3 (assistant): cached '<think>', now 'OK'."
    )
    found = Parting(how=How.PARTED, token=30, prompt_tokens=90, recorded="Monday", now="Tuesday")
    assert found.sentence() == "The prompt parts from a recorded prompt at token 30: cached 'Monday', now 'Tuesday'."
