"""Messages of a model that thinks and calls tools: its blocks, and what comes of them in the next turn's prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvtier.engine.process.messages import ChatMessage, ChatPrompt, ToolCall
from tests.support.agent_chat import AGENT, ARGUMENTS, CALL, SCHEMA, THOUGHT
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.scripted_chat import saying

_TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
_QUESTION: Any = {"role": "user", "content": "1 + 2?"}
_ASKED: Any = {"model": MODEL, "max_tokens": 500, "messages": [_QUESTION], "tools": [_TOOL]}


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("agents"), hello=AGENT) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine)) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = saying(THOUGHT + "I add.\n" + CALL)
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as one:
        yield one


def _prompt(engine: FakeEngine) -> ChatPrompt:
    assert isinstance(engine.last.prompt, ChatPrompt)
    return engine.last.prompt


def _answer(call_id: str) -> list[ChatMessage]:
    call = ToolCall("add", dict(ARGUMENTS), call_id)
    said = ChatMessage("assistant", "I add.", reasoning="One and two.", tool_calls=[call], num_more_characters=13)
    return [said, ChatMessage("tool", "3", "add", call_id=call_id)]


def test_a_message_has_a_thought_text_and_a_call(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    message = client.messages.create(**_ASKED)

    thought, text, call = message.content
    assert [one.type for one in message.content] == ["thinking", "text", "tool_use"]
    assert (thought.thinking, text.text) == ("One and two.", "I add.")  # type: ignore[union-attr]
    assert (call.name, call.input) == ("add", ARGUMENTS)  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert _prompt(engine).tools[0]["function"] == {"name": "add", "description": "Adds.", "parameters": SCHEMA}


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_a_stream_of_any_cut_gives_the_same_blocks(client: anthropic.Anthropic, engine: FakeEngine, cut: int) -> None:
    engine.script = saying(THOUGHT + "I add.\n" + CALL, piece=cut)
    with client.messages.stream(**_ASKED) as stream:
        message = stream.get_final_message()

    assert [one.type for one in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].signature  # type: ignore[union-attr]
    assert message.content[2].input == ARGUMENTS  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_what_came_goes_back_in_the_same_words(client: anthropic.Anthropic, engine: FakeEngine, display: str) -> None:
    thinking: Any = {"type": "adaptive", "display": display}
    first = client.messages.create(**_ASKED, thinking=thinking)
    call: Any = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}

    client.messages.create(
        **{**_ASKED, "messages": [_QUESTION, {"role": "assistant", "content": first.content}]}
        | {
            "messages": [
                _QUESTION,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
        },
        thinking=thinking,
    )

    assert (first.content[0].thinking == "") is (display == "omitted")  # type: ignore[union-attr]
    assert _prompt(engine).messages == [ChatMessage("user", "1 + 2?"), *_answer(call.id)]
    assert json.dumps(_prompt(engine).messages[1].tool_calls[0].arguments) == json.dumps(ARGUMENTS)


def test_results_come_before_the_text_beside_them(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    called = [{"type": "tool_use", "id": f"c{number}", "name": "add", "input": {}} for number in range(3)]
    content = [
        {"type": "tool_result", "tool_use_id": "c0", "content": "3"},
        {"type": "tool_result", "tool_use_id": "c1", "content": "too large", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
        {"type": "text", "text": "And "},
        {"type": "text", "text": "now?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    client.messages.create(
        **{
            **_ASKED,
            "messages": [_QUESTION, {"role": "assistant", "content": called}, {"role": "user", "content": content}],
        }
    )

    assert [(one.role, one.content, one.call_id) for one in _prompt(engine).messages[2:]] == [
        ("tool", "3", "c0"),
        ("tool", "too large", "c1"),
        ("tool", "error", "c2"),
        ("user", "And now?", None),
    ]


def test_thinking_is_switched_as_asked(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    seen = []
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        client.messages.create(**_ASKED, thinking=thinking)
        seen.append(_prompt(engine).template_values.get("enable_thinking"))

    assert seen == [True, False, None]


def test_choices_of_tools_are_followed(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        client.messages.create(**_ASKED, tool_choice=choice)
        assert engine.last.params.grammar is not None
    engine.script = saying(CALL + CALL)
    one = client.messages.create(**_ASKED, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    both = client.messages.create(**_ASKED, tool_choice={"type": "auto"})
    none = client.messages.create(**_ASKED, tool_choice={"type": "none"})

    assert [len(message.content) for message in (one, both)] == [1, 2]
    assert [block.type for block in none.content] == ["text"]


def test_a_form_of_the_text_is_enforced(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = saying("{}")
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        body = {"model": MODEL, "max_tokens": 5, "messages": [_QUESTION]}
        client.messages.create(**body, extra_body=fields)  # type: ignore[arg-type]
        assert engine.last.params.grammar is not None


def test_what_marks_the_cache_changes_nothing(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    client.messages.create(**_ASKED, system="Be brief.")
    plain = _prompt(engine)
    client.messages.create(
        **{
            **_ASKED,
            "tools": [{**_TOOL, **mark}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 2?", **mark}]}],
        },
        system=[{"type": "text", "text": "Be brief.", **mark}],
        cache_control={"type": "ephemeral", "ttl": "5m"},
    )

    assert _prompt(engine) == plain
