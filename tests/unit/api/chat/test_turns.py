"""Items and blocks of a conversation become the messages that they were."""

from __future__ import annotations

from kvtier.api.chat.turns import joined_turns, named_results, paired_results
from kvtier.engine.process.messages import ChatMessage, ToolCall


def _said(text: str) -> ChatMessage:
    return ChatMessage("assistant", text)


def _thought(text: str) -> ChatMessage:
    return ChatMessage("assistant", "", reasoning=text)


def _called(name: str, call_id: str = "c") -> ChatMessage:
    return ChatMessage("assistant", "", tool_calls=[ToolCall(name, {}, call_id)], num_more_characters=2)


def _user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def test_a_thought_text_and_calls_are_one_message() -> None:
    [joined] = joined_turns([_thought("Hm."), _said("I add."), _called("add", "c0"), _called("sub", "c1")])

    assert (joined.reasoning, joined.content) == ("Hm.", "I add.")
    assert [call.name for call in joined.tool_calls] == ["add", "sub"]
    assert joined.num_characters == len("Hm.I add.") + 4


def test_what_comes_in_another_order_is_another_message() -> None:
    for first, second in (
        (_said("One."), _said("Two.")),
        (_said("One."), _thought("Hm.")),
        (_called("add"), _said("Done.")),
        (_called("add"), _thought("Hm.")),
    ):
        assert joined_turns([first, second]) == [first, second]


def test_nobody_elses_messages_are_joined() -> None:
    messages = [_user("a"), _user("b"), ChatMessage("system", "c"), _said("d"), _user("e")]

    assert joined_turns(messages) == messages


def test_results_get_the_names_of_the_tools_that_were_called() -> None:
    results = [ChatMessage("tool", "3", call_id=call_id) for call_id in ("c0", "c1", "c2")]
    named = named_results([_called("add", "c0"), *results], {"c1": "sub"})

    assert [one.name for one in named[1:]] == ["add", "sub", None]


def test_results_without_ids_belong_to_the_calls_before_them() -> None:
    calls = [ToolCall("add", {}), ToolCall("sub", {}), ToolCall("add", {}, "own")]
    results = [ChatMessage("tool", text, name) for text, name in (("1", "sub"), ("2", "add"), ("3", None))]

    asked, *answers = paired_results([ChatMessage("assistant", "", tool_calls=calls), *results, results[0]])

    assert [call.call_id for call in asked.tool_calls] == ["call_0", "call_1", "own"]
    assert [answer.call_id for answer in answers] == ["call_1", "call_0", "own", None]


def test_ids_of_calls_are_the_same_in_every_turn() -> None:
    turn = [_called("add", ""), ChatMessage("tool", "3", "add")]
    first, again = paired_results(turn), paired_results([*turn, *turn])

    assert again[: len(turn)] == first
    assert [one.call_id for one in again if one.role == "tool"] == ["call_0", "call_1"]
