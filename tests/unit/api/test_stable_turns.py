"""A model's answer appears unchanged in the next turn's prompt, whichever way the client sends the history back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvtier.engine.process.messages import ChatPrompt
from kvtier.engine.process.prompt_making import template_message
from tests.support.agent_chat import SCHEMA
from tests.support.chat_templates import ALWAYS_THINKING, TEMPLATES, THINKING, answer_text, render
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.scripted_chat import hello_with, saying

_TEMPLATES = {**TEMPLATES, "thinking": THINKING, "always thinking": ALWAYS_THINKING}
_ARGUMENTS = {"b": 2, "a": 1.5, "text": 'Ünïcode "quoted"\n', "deep": {"z": [1, {"y": None}], "x": True}}
_QUESTION = "1 + 2?"
_TOOL = {"name": "add", "description": "Adds."}


def _text(template: str, prompt: object) -> str:
    """As the engine's tokenizer writes it."""
    assert isinstance(prompt, ChatPrompt)
    messages = [template_message(one) for one in prompt.messages]
    return render(template, messages, is_asked=True, tools=prompt.tools, **prompt.template_values)


def _continue_response(server: Running, *, stores: bool) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "tools": [{"type": "function", **_TOOL, "parameters": SCHEMA}], "store": stores}
        question: Any = [{"role": "user", "content": _QUESTION}]
        first = client.responses.create(**asked, input=question)
        calls = [one for one in first.output if one.type == "function_call"]
        assert len(calls) == 1
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "3"}
        if stores:
            client.responses.create(**asked, input=[result], previous_response_id=first.id)
        else:
            client.responses.create(**asked, input=[*question, *first.output, result])


def _continue_message(server: Running) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        tools = [{**_TOOL, "input_schema": SCHEMA}]
        asked: Any = {"model": MODEL, "max_tokens": 500, "tools": tools}
        question: Any = [{"role": "user", "content": _QUESTION}]
        first = client.messages.create(**asked, messages=question)
        calls = [one for one in first.content if one.type == "tool_use"]
        assert len(calls) == 1
        result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "3"}
        answer: Any = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        client.messages.create(**asked, messages=[*question, *answer])


_WAYS: dict[str, Callable[[Running], None]] = {
    "items": lambda server: _continue_response(server, stores=False),
    "previous response": lambda server: _continue_response(server, stores=True),
    "messages": _continue_message,
}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_an_answer_is_found_again_in_the_next_prompt(tmp_path: Path, name: str) -> None:
    template = _TEMPLATES[name]
    thought = "One and two." if "think" in name else ""
    answer = answer_text(template, [("add", _ARGUMENTS)], reasoning=thought)
    prompt_end = "<think>\n" if name == "always thinking" else ""
    script = saying(answer, prompt_end=prompt_end)
    with fake_engine(tmp_path, hello=hello_with(template), script=script) as engine:
        with running("openai", config_of(engine)) as server:
            for way in _WAYS.values():
                way(server)
        _check(engine, template, answer)


def _check(engine: FakeEngine, template: str, answer: str) -> None:
    texts = [_text(template, submit.prompt) for submit in engine.submits]
    assert len(texts) == 2 * len(_WAYS)
    for way, first, second in zip(_WAYS, texts[::2], texts[1::2], strict=True):
        assert second.startswith(first + answer), way
