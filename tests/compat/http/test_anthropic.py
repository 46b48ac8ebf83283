"""Anthropic's own client: messages, streams, tools, what was cached, counting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANSWER, ANTHROPIC_TOOL, CALLED, QUESTION, SYSTEM, TOOL, Asked, Forecast, forecast

_QUESTION: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(stand: Stand) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stand.openai_url, api_key="none", max_retries=0) as one:
        yield one


def test_a_message_streams_what_it_answers_whole(client: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": _QUESTION, "max_tokens": 12, "extra_body": {"top_k": 1}}
    whole = client.messages.create(**asked)

    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert text == "".join(block.text for block in whole.content)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.stop_reason == final.stop_reason
    assert whole.stop_reason in ("end_turn", "max_tokens")


def test_any_tool_is_called_and_its_result_taken(client: anthropic.Anthropic, model: str) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(
        model=model, max_tokens=4096, messages=_QUESTION, tools=[ANTHROPIC_TOOL], tool_choice=choice
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    asked = Asked.model_validate(call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": forecast(asked.place, asked.days)}

    last = client.messages.create(
        model=model,
        max_tokens=8,
        messages=[*_QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}],
        tools=[ANTHROPIC_TOOL],
        tool_choice={"type": "none"},
    )

    assert answer.stop_reason == "tool_use"
    assert call.name == TOOL
    assert last.usage.output_tokens > 0


def test_its_tool_runner_calls_a_function_and_goes_on_without_a_thread(client: anthropic.Anthropic) -> None:
    asked: list[tuple[str, int]] = []

    @anthropic.beta_tool
    def get_weather(place: str, days: int) -> str:
        """How the weather will be."""
        asked.append((place, days))
        return forecast(place, days)

    runner = client.beta.messages.tool_runner(
        model="caller", max_tokens=300, messages=_QUESTION, tools=[get_weather], max_iterations=4
    )
    first, last = list(runner)

    assert asked == [(CALLED["place"], CALLED["days"])]
    assert first.stop_reason == "tool_use"
    assert "".join(block.text for block in last.content if block.type == "text") == ANSWER


def test_a_named_call_is_streamed(client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(
        model=model,
        max_tokens=4096,
        messages=_QUESTION,
        tools=[ANTHROPIC_TOOL],
        tool_choice={"type": "tool", "name": TOOL},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()

    (call,) = [block for block in final.content if block.type == "tool_use"]
    Asked.model_validate(call.input)
    assert {"message_start", "content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds


def test_blocks_of_a_system_prompt_are_taken_and_cached(client: anthropic.Anthropic) -> None:
    system: Any = [
        {"type": "text", "text": SYSTEM},
        {"type": "text", "text": "Rain falls mainly in the plain. " * 20, "cache_control": {"type": "ephemeral"}},
    ]
    asked: dict[str, Any] = {"model": "mistral", "system": system, "messages": _QUESTION, "max_tokens": 4}
    first = client.messages.create(**asked).usage
    again = client.messages.create(**asked).usage
    begun = next(iter(client.messages.create(**asked, stream=True))).message.usage

    assert first.cache_creation_input_tokens > 0
    assert again.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert begun.cache_read_input_tokens == again.cache_read_input_tokens, "a stream says it at its start"
    assert begun.input_tokens == again.input_tokens
    assert _whole_prompt(first) == _whole_prompt(again)


def test_counted_tokens_are_those_of_the_message(client: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "system": SYSTEM, "messages": _QUESTION, "tools": [ANTHROPIC_TOOL]}
    counted = client.messages.count_tokens(**asked)

    usage = client.messages.create(**asked, max_tokens=1).usage

    assert counted.input_tokens == _whole_prompt(usage)


def test_a_thought_is_a_block_of_its_own(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    answers = [
        client.messages.create(model="qwen", max_tokens=2048, messages=_QUESTION, thinking=thinking) for _ in range(4)
    ]

    assert any(block.type == "thinking" and block.thinking for answer in answers for block in answer.content)


def test_an_answer_is_parsed_into_a_model_of_pydantic(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(model="llama", max_tokens=4096, messages=_QUESTION, output_format=Forecast)

    assert isinstance(answer.parsed_output, Forecast)


def test_mistakes_are_the_clients_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", max_tokens=4, messages=_QUESTION)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="qwen", max_tokens=0, messages=_QUESTION)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def _whole_prompt(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def test_tools_of_anthropics_own_are_called_by_their_names(client: anthropic.Anthropic, model: str) -> None:
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 1},
    ]
    answer = client.messages.create(
        model=model, max_tokens=4096, messages=_QUESTION, tools=tools, tool_choice={"type": "tool", "name": "bash"}
    )

    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "bash"
    assert set(call.input) <= {"command", "restart"}
