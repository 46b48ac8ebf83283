"""Ollama's own client: chats, texts, tools, forms of answers, thoughts."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANSWER, CALLED, OLLAMA_TOOL, QUESTION, SYSTEM, TOOL, Forecast, forecast

_QUESTION: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
_GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(stand: Stand) -> ollama.Client:
    return ollama.Client(host=stand.ollama_url)


def test_every_model_is_listed_and_shown(client: ollama.Client) -> None:
    names = {str(one.model).removesuffix(":latest") for one in client.list().models}

    assert {"qwen", "llama", "mistral"} <= names
    assert {"completion", "tools", "thinking"} <= set(client.show("qwen").capabilities)
    assert "tools" in client.show("llama").capabilities


def test_a_chat_streams_what_it_answers_whole(client: ollama.Client, model: str) -> None:
    whole = client.chat(model, _QUESTION, options=_GREEDY)

    pieces = list(client.chat(model, _QUESTION, options=_GREEDY, stream=True))

    assert "".join(piece.message.content or "" for piece in pieces) == (whole.message.content or "")
    assert pieces[-1].done
    assert pieces[-1].eval_count == whole.eval_count


def test_a_text_is_generated(client: ollama.Client, model: str) -> None:
    answer = client.generate(model, QUESTION, system=SYSTEM, options=_GREEDY)

    assert answer.eval_count > 0
    assert answer.done_reason in ("stop", "length")


def test_tools_and_their_results_are_taken(client: ollama.Client, model: str) -> None:
    call = {"function": {"name": TOOL, "arguments": {"place": "Oslo", "days": 3}}}
    messages = [
        *_QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": TOOL, "content": forecast("Oslo", 3)},
    ]

    first = client.chat(model, _QUESTION, tools=[OLLAMA_TOOL], options=_GREEDY)
    last = client.chat(model, messages, tools=[OLLAMA_TOOL], options=_GREEDY)

    assert last.prompt_eval_count > first.prompt_eval_count


def test_a_function_of_python_is_a_tool(client: ollama.Client) -> None:
    def get_weather(place: str, days: int) -> str:
        """How the weather will be.

        Args:
            place: a town
            days: from now
        """
        return forecast(place, days)

    message = client.chat("caller", _QUESTION, tools=[get_weather]).message
    assert message.tool_calls
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == (TOOL, CALLED)
    result = {"role": "tool", "tool_name": TOOL, "content": get_weather(**call.function.arguments)}

    last = client.chat("caller", [*_QUESTION, message, result], tools=[get_weather]).message

    assert (last.content, last.tool_calls) == (ANSWER, None)


def test_a_call_comes_in_a_stream(client: ollama.Client) -> None:
    pieces = list(client.chat("caller", _QUESTION, tools=[OLLAMA_TOOL], stream=True))

    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [(TOOL, CALLED)]
    assert not "".join(piece.message.content or "" for piece in pieces)


def test_an_answer_follows_a_schema(client: ollama.Client, model: str) -> None:
    chat = client.chat(model, _QUESTION, format=Forecast.model_json_schema())
    text = client.generate(model, QUESTION, format=Forecast.model_json_schema())

    assert Forecast.model_validate_json(chat.message.content)
    assert Forecast.model_validate_json(text.response)


def test_a_thought_is_apart_from_the_answer(client: ollama.Client) -> None:
    options = [{"num_predict": 12, "seed": seed, "top_k": 0, "top_p": 1.0, "temperature": 1.0} for seed in range(8)]
    thinking = [client.chat("qwen", _QUESTION, think=True, options=one).message for one in options]
    without = [client.chat("qwen", _QUESTION, think=False, options=one).message for one in options]

    assert any(message.thinking for message in thinking)
    assert any(message.content for message in without)
    assert not any(message.thinking for message in without)


def test_mistakes_are_the_clients_exceptions(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("no-such-model", _QUESTION)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("llama", _QUESTION, think=True)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed("llama", "some text")
    assert caught.value.status_code == 400
