"""An agent's session of 30 turns with tools, in each API: a turn's prompt begins with all of the one before it.

The model is a random one, which calls nothing: the client makes up what it called, and sends it back as agents do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvtier.testing.tiny_models import save_tiny_model
from tests.support.agent_chat import SCHEMA
from tests.support.chat_templates import THINKING
from tests.support.deployments import DeploymentProcess

pytestmark = pytest.mark.slow

_MODEL = "tiny"
_NUM_TURNS = 30
_BLOCK_TOKENS = 16
_ENOUGH = 0.99
_DEPLOYMENT = """\
models:
  - model: tiny
    kv_cache_space: 128MiB
"""
_INSTRUCTIONS = "You add numbers. Call the tool, then say what it found. " * 4
_TOOL = {"name": "add", "description": "Adds two numbers."}


@dataclass(frozen=True, slots=True)
class _Turn:
    """The server's counts of one turn."""

    prompt_tokens: int
    cached_tokens: int


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder: Path = tmp_path_factory.mktemp("agents")
    save_tiny_model(folder / _MODEL, "llama", max_position_embeddings=32_768)
    (folder / _MODEL / "chat_template.jinja").write_text(THINKING)
    with DeploymentProcess(folder, _DEPLOYMENT) as running:
        yield running


@pytest.fixture
def responses(deployment: DeploymentProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.openai_url}/v1", api_key="none", max_retries=0) as one:
        yield one


def _check(turns: list[_Turn]) -> None:
    """Every turn but the first found the whole prompt of the one before it, in full blocks."""
    assert len(turns) == _NUM_TURNS
    for before, turn in itertools.pairwise(turns):
        full_tokens = before.prompt_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
        assert turn.prompt_tokens > before.prompt_tokens
        assert turn.cached_tokens >= _ENOUGH * full_tokens


def _thought(number: int) -> str:
    return f"Turn {number}: {number} and {number + 1}."


def _items(number: int, name: str) -> list[Any]:
    """The model's scripted thought and calls, and the result."""
    arguments = f'{{"b": {number}, "a": {number + 1}}}'
    call_id = f"call_{name}_{number}"
    return [
        {"type": "reasoning", "id": f"rs_{number}", "summary": []}
        | {"content": [{"type": "reasoning_text", "text": _thought(number)}]},
        {"type": "function_call", "call_id": call_id, "name": "add", "arguments": arguments},
        {"type": "function_call_output", "call_id": call_id, "output": f"The sum is {2 * number + 1}."},
    ]


def _response(client: openai.OpenAI, **fields: Any) -> tuple[str, _Turn]:
    tool: Any = {"type": "function", **_TOOL, "parameters": SCHEMA, "strict": False}
    asked: Any = {"model": _MODEL, "instructions": _INSTRUCTIONS, "tools": [tool], "max_output_tokens": 2}
    response = client.responses.create(**asked, temperature=0, **fields)
    assert response.usage is not None
    details = response.usage.input_tokens_details
    return response.id, _Turn(response.usage.input_tokens, details.cached_tokens)


def test_stateless_responses_find_the_turn_before(responses: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Stateless: add a lot of numbers."}]
    turns = []
    for number in range(_NUM_TURNS):
        turns.append(_response(responses, input=items, store=False)[1])
        items += _items(number, "stateless")

    _check(turns)


def test_responses_that_continue_others_find_the_turn_before(responses: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Stored: add a lot of numbers."}]
    turns, previous = [], None
    for number in range(_NUM_TURNS):
        previous, turn = _response(responses, input=items, previous_response_id=previous)
        turns.append(turn)
        items = _items(number, "stored")

    _check(turns)


def test_messages_find_the_turn_before(deployment: DeploymentProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "Messages: add a lot of numbers."}]
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    turns = []
    with anthropic.Anthropic(base_url=deployment.openai_url, api_key="none", max_retries=0) as client:
        for number in range(_NUM_TURNS):
            usage = client.messages.create(
                model=_MODEL,
                max_tokens=2,
                system=[{"type": "text", "text": _INSTRUCTIONS, **mark}],
                tools=[{**_TOOL, "input_schema": SCHEMA, **mark}],
                messages=[*messages[:-1], _marked(messages[-1], mark)],
            ).usage
            read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
            turns.append(_Turn(usage.input_tokens + read + written, read))
            messages += _blocks(number)

    _check(turns)


def _marked(message: Any, mark: Any) -> Any:
    """Mark like agents: only the last message is marked."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*blocks[:-1], {**blocks[-1], **mark}]}


def _blocks(number: int) -> list[Any]:
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "add", "input": {"b": number, "a": number + 1}}
    thought = {"type": "thinking", "thinking": _thought(number), "signature": "kvtier"}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"The sum is {2 * number + 1}."}
    return [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]


def test_a_prompt_has_as_many_tokens_as_were_counted(deployment: DeploymentProcess) -> None:
    with anthropic.Anthropic(base_url=deployment.openai_url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Count me."}, *_blocks(1)]
        tools: Any = [{**_TOOL, "input_schema": SCHEMA}]
        counted = client.messages.count_tokens(model=_MODEL, messages=messages, tools=tools, system="Be brief.")
        usage = client.messages.create(
            model=_MODEL, max_tokens=1, messages=messages, tools=tools, system="Be brief."
        ).usage

    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + read + written > 100
