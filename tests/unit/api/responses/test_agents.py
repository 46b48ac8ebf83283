"""Responses of a model that thinks and calls tools: its items, and what comes of them in the next turn's prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvtier.engine.process.messages import ChatMessage, ChatPrompt, ToolCall
from tests.support.agent_chat import AGENT, ARGUMENTS, CALL, SCHEMA, THOUGHT
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.scripted_chat import saying

_TOOL: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}


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
def client(server: Running, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def _prompt(engine: FakeEngine) -> ChatPrompt:
    assert isinstance(engine.last.prompt, ChatPrompt)
    return engine.last.prompt


def _answer(call_id: str) -> list[ChatMessage]:
    """The model's answer as the next prompt contains it, and the tool's result."""
    call = ToolCall("add", dict(ARGUMENTS), call_id)
    said = ChatMessage("assistant", "I add.", reasoning="One and two.", tool_calls=[call], num_more_characters=16)
    return [said, ChatMessage("tool", "3", "add", call_id=call_id)]


def test_a_response_has_a_thought_text_and_a_call(client: openai.OpenAI, engine: FakeEngine) -> None:
    response = client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL])

    thought, text, call = response.output
    assert [one.type for one in response.output] == ["reasoning", "message", "function_call"]
    assert thought.content[0].text == "One and two."  # type: ignore[union-attr, index]
    assert text.content[0].text == "I add."  # type: ignore[union-attr, index]
    assert (call.name, call.arguments) == ("add", '{"b": 2, "a": 1}')  # type: ignore[union-attr]
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert _prompt(engine).tools[0]["function"] == {"name": "add", "description": "Adds.", "parameters": SCHEMA}


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_a_stream_of_any_cut_gives_the_same_items(client: openai.OpenAI, engine: FakeEngine, cut: int) -> None:
    engine.script = saying(THOUGHT + "I add.\n" + CALL, piece=cut)
    with client.responses.stream(model=MODEL, input="1 + 2?", tools=[_TOOL]) as stream:
        events = list(stream)
    response = stream.get_final_response()

    assert [one.type for one in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "I add."
    kinds = {
        "response.reasoning_text.delta": "One and two.",
        "response.output_text.delta": "I add.",
        "response.function_call_arguments.delta": '{"b": 2, "a": 1}',
    }
    for kind, text in kinds.items():
        assert "".join(event.delta for event in events if event.type == kind) == text
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [one.id for one in done] == [one.id for one in response.output]


def test_what_came_goes_back_in_the_same_words_with_the_items(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL], store=False)
    call: Any = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}

    client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "1 + 2?"}, *first.output, result],  # type: ignore[list-item]
        tools=[_TOOL],
        store=False,
    )

    assert _prompt(engine).messages == [ChatMessage("user", "1 + 2?"), *_answer(call.call_id)]
    assert json.dumps(_prompt(engine).messages[1].tool_calls[0].arguments) == call.arguments


def test_what_came_goes_back_in_the_same_words_by_its_id(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL])
    call: Any = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}

    client.responses.create(model=MODEL, input=[result], tools=[_TOOL], previous_response_id=first.id)
    by_id = _prompt(engine).messages
    references: Any = [{"type": "item_reference", "id": one.id} for one in first.output]
    client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "1 + 2?"}, *references, result], tools=[_TOOL]
    )

    assert by_id == [ChatMessage("user", "1 + 2?"), *_answer(call.call_id)]
    assert _prompt(engine).messages == by_id


def test_a_thought_travels_sealed_where_a_client_asks_for_that(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(
        model=MODEL, input="1 + 2?", tools=[_TOOL], store=False, include=["reasoning.encrypted_content"]
    )
    thought: Any = first.output[0].to_dict()
    thought.pop("content")

    client.responses.create(
        model=MODEL,
        input=[thought, {"role": "assistant", "content": "Three."}, {"role": "user", "content": "More."}],
        store=False,
    )

    assert _prompt(engine).messages[0] == ChatMessage("assistant", "Three.", reasoning="One and two.")


def test_thoughts_of_other_servers_are_passed_over(client: openai.OpenAI, engine: FakeEngine) -> None:
    foreign: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    client.responses.create(model=MODEL, input=[foreign, {"role": "user", "content": "Hi."}], store=False)

    assert _prompt(engine).messages == [ChatMessage("user", "Hi.")]


def test_effort_none_turns_thinking_off(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("Three.")
    response = client.responses.create(model=MODEL, input="1 + 2?", reasoning={"effort": "none"})

    assert response.output_text == "Three."
    assert _prompt(engine).template_values["enable_thinking"] is False


def test_a_call_that_is_asked_for_is_enforced(client: openai.OpenAI, engine: FakeEngine) -> None:
    for choice in ("required", {"type": "function", "name": "add"}):
        client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL], tool_choice=choice)  # type: ignore[arg-type]
        assert engine.last.params.grammar is not None
    client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL])
    assert engine.last.params.grammar is None


def test_tools_that_servers_run_are_not_offered(client: openai.OpenAI, engine: FakeEngine) -> None:
    hosted: Any = [{"type": "web_search", "external_web_access": False}, {"type": "mcp", "server_label": "x"}]
    client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL])
    without = _prompt(engine)
    response = client.responses.create(model=MODEL, input="1 + 2?", tools=[*hosted, _TOOL])

    assert _prompt(engine) == without
    assert [tool.type for tool in response.tools] == ["function"]
    for choice in ("required", {"type": "web_search"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.responses.create(model=MODEL, input="1 + 2?", tools=hosted, tool_choice=choice)  # type: ignore[arg-type]


def test_a_form_of_the_text_is_enforced(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying("{}")
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(model=MODEL, input="1 + 2?", text=form)

    assert engine.last.params.grammar is not None
    assert '"integer"' in engine.last.params.grammar.text
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_a_turn_in_a_large_body_is_the_same(client: openai.OpenAI, engine: FakeEngine, tmp_path: Path) -> None:
    first = client.responses.create(model=MODEL, input="1 + 2?", tools=[_TOOL])
    call: Any = first.output[-1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    padding: Any = {"role": "user", "content": "x" * 40_000}
    for fields in ({"previous_response_id": first.id}, {}):
        own = [] if fields else [{"role": "user", "content": "1 + 2?"}]
        own += [] if fields else [{"type": "item_reference", "id": one.id} for one in first.output]
        client.responses.create(model=MODEL, input=[*own, result, padding], tools=[_TOOL], **fields)  # type: ignore[call-overload]
        assert _prompt(engine).messages[:3] == [ChatMessage("user", "1 + 2?"), *_answer(call.call_id)]
