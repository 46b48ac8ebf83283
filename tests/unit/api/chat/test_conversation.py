"""An engine's request for a conversation: the prompt, the grammar and the reading of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvtier.api.chat.conversation import Conversation, Tool, ToolChoice, ask
from kvtier.api.engine_connection import EngineConnection
from kvtier.api.engines import ServedModel
from kvtier.api.http_error import HttpError
from kvtier.engine.grammar import JSON_OBJECT
from kvtier.engine.process.messages import ChatMessage, ToolCall
from kvtier.errors import EngineAway
from tests.support.chat_templates import ALWAYS_THINKING, TEMPLATES, THINKING, WITHOUT_TOOLS
from tests.support.fake_engine import HELLO

USER = [ChatMessage("user", "hi")]
_SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}


def model_of(template: str, special_tokens: dict[str, int] | None = None, **values: str) -> ServedModel:
    connection = EngineConnection("engine-0", "/nowhere")
    connection.hello = msgspec.structs.replace(HELLO, chat_template=template, special_tokens=special_tokens or {})
    return ServedModel(("tiny",), [connection], **values)  # type: ignore[arg-type]


def tool(name: str = "f", *, is_strict: bool = False) -> Tool:
    document: dict[str, Any] = {"type": "function", "function": {"parameters": _SCHEMA, "name": name}}
    return Tool(name, _SCHEMA, document, is_strict)


HERMES = model_of(TEMPLATES["hermes"])


def test_tools_reach_the_template_as_they_came() -> None:
    tools = [tool("z"), tool("a")]

    asked = ask(Conversation(USER, tools), HERMES)

    assert asked.prompt.tools == [one.document for one in tools]
    assert [list(one["function"]) for one in asked.prompt.tools] == [["parameters", "name"]] * 2  # type: ignore[call-overload]
    assert asked.prompt.num_characters > len("hi")
    assert (asked.form.tool_format, asked.form.tool_names) == ("hermes", ("z", "a"))
    assert (asked.grammar, asked.sampling) == (None, {})


def test_without_tools_marks_are_text() -> None:
    asked = ask(Conversation(USER), HERMES)

    assert (asked.form.tool_format, asked.prompt.tools, asked.grammar) == ("", [], None)


def test_tools_that_may_not_be_called_stay_in_the_prompt_which_is_the_same_next_turn() -> None:
    asked = ask(Conversation(USER, [tool()], ToolChoice("none")), HERMES)

    assert (asked.form.tool_format, len(asked.prompt.tools)) == ("", 1)


def test_a_template_that_does_not_know_tools_is_not_offered_any() -> None:
    model = model_of(WITHOUT_TOOLS)

    with pytest.raises(HttpError, match="tools are not supported by tiny: its chat template does not use them"):
        ask(Conversation(USER, [tool()]), model)
    assert ask(Conversation(USER, [tool()], ToolChoice("none")), model).prompt.tools == []


def test_a_way_to_write_calls_that_is_not_known_can_be_named_in_the_file() -> None:
    template = "{{ tools }}{{ messages }}"

    with pytest.raises(HttpError, match="set tool_format in the deployment"):
        ask(Conversation(USER, [tool()]), model_of(template))
    assert ask(Conversation(USER, [tool()]), model_of(template, tool_format="glm45")).form.tool_format == "glm45"


@pytest.mark.parametrize("kind", ["auto", "required"])
def test_a_template_that_refuses_a_second_call_gets_one_at_a_time(kind: Any) -> None:
    model = model_of(TEMPLATES["llama3_json"])
    model.connections[0].hello = msgspec.structs.replace(model.connections[0].hello or HELLO, takes_several_calls=False)
    conversation = Conversation(USER, [tool(is_strict=True)], ToolChoice(kind))

    one = ask(conversation, model)
    several = ask(conversation, model_of(TEMPLATES["llama3_json"]))

    assert (one.form.allows_several, several.form.allows_several) == (False, True)
    assert one.grammar != several.grammar
    assert one.grammar == ask(replace(conversation, allows_several_calls=False), model).grammar


def test_tools_wait_for_a_model_that_is_known() -> None:
    model = ServedModel(("tiny",), [EngineConnection("engine-0", "/nowhere")])

    with pytest.raises(EngineAway, match="tiny is starting"):
        ask(Conversation(USER, [tool()]), model)


def test_formats_without_types_are_told_them() -> None:
    asked = ask(Conversation(USER, [tool()]), model_of(TEMPLATES["qwen3_coder"]))

    assert asked.form.parameter_types == {"f": {"b": ["integer"], "a": ["string"]}}


def test_marks_that_are_special_tokens_are_kept_in_the_text() -> None:
    special = {"[TOOL_CALLS]": 5, "</s>": 2, "<think>": 6}

    asked = ask(Conversation(USER, [tool()]), model_of(TEMPLATES["mistral"], special))

    assert asked.sampling == {"kept_special_tokens": ("[TOOL_CALLS]",)}
    assert ask(Conversation(USER), model_of(TEMPLATES["mistral"], special)).sampling == {}


def test_ids_of_calls_get_the_length_that_the_template_wants_always_the_same() -> None:
    messages = [
        ChatMessage("assistant", "", tool_calls=[ToolCall("f", {}, "call_0123456789"), ToolCall("f", {}, "abcdefghi")]),
        ChatMessage("tool", "1", call_id="call_0123456789"),
    ]

    first, again = (ask(Conversation(messages, [tool()]), model_of(TEMPLATES["mistral"])) for _ in range(2))

    assistant, answer = first.prompt.messages
    assert assistant.tool_calls[0].call_id == answer.call_id
    assert len(answer.call_id or "") == 9
    assert assistant.tool_calls[1].call_id == "abcdefghi"
    assert first.prompt == again.prompt


def test_ids_are_shortened_also_where_no_tool_is_offered_any_more() -> None:
    messages = [ChatMessage("tool", "1", call_id="call_0123456789")]

    [found] = ask(Conversation(messages), model_of(TEMPLATES["mistral"])).prompt.messages

    assert len(found.call_id or "") == 9


def test_a_template_of_its_own_for_tools_is_looked_at() -> None:
    model = model_of(WITHOUT_TOOLS)
    hello = msgspec.structs.replace(model.connections[0].hello or HELLO, tool_template=TEMPLATES["hermes"])
    model.connections[0].hello = hello

    assert ask(Conversation(USER, [tool()]), model).form.tool_format == "hermes"


# --- thinking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinks", "effort", "expected"),
    [(None, None, {}), (False, None, {"enable_thinking": False}), (True, "low", {"enable_thinking": True})],
)
def test_only_switches_that_the_template_names_are_told(
    thinks: bool | None, effort: str | None, expected: dict[str, object]
) -> None:
    asked = ask(Conversation(USER, thinks=thinks, effort=effort), model_of(THINKING))

    assert asked.prompt.template_values == expected
    assert asked.form.splits_reasoning


def test_an_effort_is_told_to_a_template_that_names_it() -> None:
    asked = ask(Conversation(USER, thinks=True, effort="low"), model_of("{{ messages }}{{ reasoning_effort }}"))

    assert asked.prompt.template_values == {"reasoning_effort": "low"}
    assert not asked.form.splits_reasoning


def test_what_the_client_tells_the_template_goes_first() -> None:
    conversation = Conversation(USER, thinks=True, template_values={"enable_thinking": False, "x": 1})

    assert ask(conversation, model_of(THINKING)).prompt.template_values == {"enable_thinking": False, "x": 1}


def test_the_file_says_whether_a_model_thinks() -> None:
    assert not ask(Conversation(USER), model_of(THINKING, reasoning_format="none")).form.splits_reasoning
    assert ask(Conversation(USER), model_of("{{ messages }}", reasoning_format="think")).form.splits_reasoning


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_an_output_without_tools_and_thoughts_is_its_own_grammar() -> None:
    asked = ask(Conversation(USER, output=JSON_OBJECT), HERMES)

    assert (asked.grammar, asked.prompt.grammar_in_thought) == (JSON_OBJECT, None)


def test_a_model_that_thinks_may_do_so_before_an_output() -> None:
    asked = ask(Conversation(USER, output=JSON_OBJECT), model_of(ALWAYS_THINKING))

    assert asked.grammar is not None
    assert asked.prompt.grammar_in_thought is not None
    assert asked.grammar.kind == asked.prompt.grammar_in_thought.kind == "lark"


def test_a_model_whose_thinking_is_off_may_not() -> None:
    asked = ask(Conversation(USER, output=JSON_OBJECT, thinks=False), model_of(THINKING))

    assert (asked.grammar, asked.prompt.grammar_in_thought) == (JSON_OBJECT, None)


@pytest.mark.parametrize("kind", ["required", "named"])
def test_a_call_that_must_come_has_a_grammar(kind: Any) -> None:
    asked = ask(Conversation(USER, [tool("f"), tool("g")], ToolChoice(kind, "g")), HERMES)

    assert asked.grammar is not None
    assert ('"f' in asked.grammar.text or '\\"f\\"' in asked.grammar.text) is (kind == "required")
    assert '\\"g\\"' in asked.grammar.text


def test_only_strict_tools_have_a_grammar_where_the_model_may_choose() -> None:
    assert ask(Conversation(USER, [tool()]), HERMES).grammar is None
    assert ask(Conversation(USER, [tool(is_strict=True)]), HERMES).grammar is not None
    assert ask(Conversation(USER, [tool(is_strict=True)], ToolChoice("none")), HERMES).grammar is None
