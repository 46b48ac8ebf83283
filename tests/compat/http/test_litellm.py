"""LiteLLM, by each of the routes that it has to a server like this."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANSWER, CALLED, CHAT_TOOL, QUESTION, SYSTEM, TOOL, Asked, Forecast, forecast

_QUESTION: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@pytest.fixture(params=["openai", "ollama_chat", "anthropic"])
def route(request: pytest.FixtureRequest, stand: Stand) -> dict[str, Any]:
    name = str(request.param)
    bases = {"openai": stand.v1, "ollama_chat": stand.ollama_url, "anthropic": stand.openai_url}
    return {"model": f"{name}/qwen", "api_base": bases[name], "api_key": "none", "num_retries": 0}


@pytest.fixture(params=["openai", "anthropic"])
def forcing_route(request: pytest.FixtureRequest, stand: Stand) -> dict[str, Any]:
    """One whose API can ask for a call that must come."""
    base = stand.v1 if request.param == "openai" else stand.openai_url
    return {"model": f"{request.param}/llama", "api_base": base, "api_key": "none", "num_retries": 0}


def test_a_chat_is_answered_and_streamed(route: dict[str, Any]) -> None:
    whole = litellm.completion(**route, messages=_QUESTION, max_tokens=8)
    chunks = list(litellm.completion(**route, messages=_QUESTION, max_tokens=8, stream=True))

    assert 0 < whole.usage.completion_tokens <= 8
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_call_is_made_and_its_result_taken(route: dict[str, Any]) -> None:
    asked: dict[str, Any] = {**route, "model": route["model"].replace("qwen", "caller"), "tools": [CHAT_TOOL]}
    first = litellm.completion(**asked, messages=_QUESTION, max_tokens=64).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": forecast(**json.loads(call.function.arguments))}

    last = litellm.completion(**asked, messages=[*_QUESTION, first.model_dump(), result], max_tokens=64)

    assert (call.function.name, json.loads(call.function.arguments)) == (TOOL, CALLED)
    assert last.choices[0].message.content == ANSWER
    assert not last.choices[0].message.tool_calls


def test_an_answer_is_sent_back_with_all_that_the_client_has_of_it(route: dict[str, Any]) -> None:
    """It keeps what is peculiar to a provider, and gives it back with the history."""
    first = litellm.completion(**route, messages=_QUESTION, max_tokens=8)
    answer = {
        **first.choices[0].message.model_dump(),
        "provider_specific_fields": {"citations": None, "of": "another server"},
        "thinking_blocks": [{"type": "thinking", "thinking": "Three days.", "signature": "kvtier"}],
        "images": [],
    }
    messages = [*_QUESTION, answer, {"role": "user", "content": "And in Paris?"}]

    last = litellm.completion(**route, messages=messages, max_tokens=8)

    assert last.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_call_that_is_required_comes(forcing_route: dict[str, Any]) -> None:
    answer = litellm.completion(
        **forcing_route, messages=_QUESTION, tools=[CHAT_TOOL], tool_choice="required", max_tokens=4096
    )

    calls = answer.choices[0].message.tool_calls
    assert {call.function.name for call in calls} == {TOOL}
    assert all(Asked.model_validate_json(call.function.arguments) for call in calls)


def test_a_call_is_put_together_from_its_stream(forcing_route: dict[str, Any]) -> None:
    chunks = list(
        litellm.completion(
            **forcing_route,
            messages=_QUESTION,
            tools=[CHAT_TOOL],
            tool_choice={"type": "function", "function": {"name": TOOL}},
            max_tokens=4096,
            stream=True,
        )
    )

    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert call.function.name == TOOL
    assert Asked.model_validate_json(call.function.arguments)


def test_an_answer_follows_a_schema(route: dict[str, Any]) -> None:
    answer = litellm.completion(**route, messages=_QUESTION, response_format=Forecast, max_tokens=4096)

    assert Forecast.model_validate_json(answer.choices[0].message.content)


def test_a_response_is_answered(stand: Stand) -> None:
    answer = litellm.responses(
        model="openai/qwen", api_base=stand.v1, api_key="none", input=QUESTION, max_output_tokens=16
    )

    assert 0 < answer.usage.output_tokens <= 16
