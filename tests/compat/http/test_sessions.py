"""An agent's session of thirty turns, each with a call and its result, in each of the three APIs.

Every turn's prompt begins with the one before it, and finds at least 99% of its full blocks in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANTHROPIC_TOOL, CHAT_TOOL, QUESTION, RESPONSES_TOOL, SYSTEM, Asked, forecast

_NUM_TURNS = 30
_LEAST = 0.99
_BLOCK_TOKENS = 16

Turn = tuple[int, int]
"""Tokens of a prompt, and how many of them were cached."""


def _chat(client: openai.OpenAI, model: str) -> Iterator[Turn]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[CHAT_TOOL], tool_choice="required", parallel_tool_calls=False
        )
        yield answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens
        said = answer.choices[0].message
        (call,) = said.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": _result(call.function.arguments)}
        messages += [said.model_dump(exclude_none=True), result]


def _responses(client: openai.OpenAI, model: str) -> Iterator[Turn]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.responses.create(
            model=model,
            instructions=SYSTEM,
            input=items,
            tools=[RESPONSES_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            store=False,
        )
        yield answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens
        (call,) = [item for item in answer.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": _result(call.arguments)}
        items += [*(item.model_dump(exclude_none=True) for item in answer.output), result]


def _linked_responses(client: openai.OpenAI, model: str) -> Iterator[Turn]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    before: Any = openai.NOT_GIVEN
    while True:
        answer = client.responses.create(
            model=model,
            instructions=SYSTEM,
            input=items,
            tools=[RESPONSES_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            previous_response_id=before,
        )
        yield answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens
        (call,) = [item for item in answer.output if item.type == "function_call"]
        items = [{"type": "function_call_output", "call_id": call.call_id, "output": _result(call.arguments)}]
        before = answer.id


def _messages(client: anthropic.Anthropic, model: str) -> Iterator[Turn]:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = client.messages.create(
            model=model,
            max_tokens=4096,
            system=SYSTEM,
            messages=messages,
            tools=[ANTHROPIC_TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        usage = answer.usage
        cached = usage.cache_read_input_tokens or 0
        yield usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        asked = Asked.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": forecast(asked.place, asked.days)}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]


def _result(arguments: str) -> str:
    asked = Asked.model_validate_json(arguments)
    return forecast(asked.place, asked.days)


@pytest.mark.parametrize(
    "api", ["chat", "responses", pytest.param("linked responses", marks=pytest.mark.nightly), "messages"]
)
def test_every_turn_finds_all_of_the_turn_before(stand: Stand, api: str) -> None:
    own = {"base_url": stand.v1, "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**own) as ours, anthropic.Anthropic(**{**own, "base_url": stand.openai_url}) as theirs:
        sessions = {
            "chat": lambda: _chat(ours, "qwen"),
            "responses": lambda: _responses(ours, "qwen"),
            "linked responses": lambda: _linked_responses(ours, "qwen"),
            "messages": lambda: _messages(theirs, "qwen"),
        }
        turns = [turn for turn, _ in zip(sessions[api](), range(_NUM_TURNS), strict=False)]

    assert len(turns) == _NUM_TURNS
    for number in range(1, _NUM_TURNS):
        full_blocks = turns[number - 1][0] // _BLOCK_TOKENS
        assert turns[number][0] > turns[number - 1][0]
        assert turns[number][1] >= _LEAST * full_blocks * _BLOCK_TOKENS, (number, turns)
