"""LangChain's models for OpenAI's API, for Responses and for Ollama's: tools and forms of answers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANSWER, CALLED, DESCRIPTION, QUESTION, TOOL, Asked, Forecast, forecast

_WEATHER = StructuredTool.from_function(forecast, name=TOOL, description=DESCRIPTION, args_schema=Asked)


def _openai(stand: Stand, model: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=stand.v1, api_key="none", max_retries=0, **fields)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def uses_responses(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_call_is_made_and_its_result_taken(stand: Stand, model: str, uses_responses: bool) -> None:
    chat = _openai(stand, model, use_responses_api=uses_responses)
    bound = chat.bind_tools([_WEATHER], tool_choice="required", strict=True, parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    result = _WEATHER.invoke(call)

    last = chat.bind_tools([_WEATHER], tool_choice="none").invoke([HumanMessage(QUESTION), answer, result])

    assert isinstance(result, ToolMessage)
    assert Asked.model_validate(call["args"])
    assert isinstance(last, AIMessage)
    assert last.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def test_a_call_is_put_together_from_its_stream(stand: Stand, model: str) -> None:
    whole: Any = None
    for chunk in _openai(stand, model).bind_tools([_WEATHER], tool_choice=TOOL, strict=True).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk

    assert [call["name"] for call in whole.tool_calls] == [TOOL]
    assert Asked.model_validate(whole.tool_calls[0]["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_follows_a_schema(stand: Stand, model: str, method: Any) -> None:
    answer = _openai(stand, model).with_structured_output(Forecast, method=method).invoke(QUESTION)

    assert isinstance(answer, Forecast)


def test_a_chat_over_ollamas_api(stand: Stand, model: str) -> None:
    chat = ChatOllama(model=model, base_url=stand.ollama_url, num_predict=12)

    assert chat.invoke(QUESTION).usage_metadata["output_tokens"] > 0


def test_a_call_over_ollamas_api_is_made_and_its_result_taken(stand: Stand) -> None:
    chat = ChatOllama(model="caller", base_url=stand.ollama_url).bind_tools([_WEATHER])
    answer = chat.invoke(QUESTION)
    (call,) = answer.tool_calls

    last = chat.invoke([HumanMessage(QUESTION), answer, _WEATHER.invoke(call)])

    assert (call["name"], call["args"]) == (TOOL, CALLED)
    assert (last.content, last.tool_calls) == (ANSWER, [])


def test_an_answer_over_ollamas_api_follows_a_schema(stand: Stand, model: str) -> None:
    chat = ChatOllama(model=model, base_url=stand.ollama_url)

    assert isinstance(chat.with_structured_output(Forecast, method="json_schema").invoke(QUESTION), Forecast)


def test_a_thought_over_ollamas_api(stand: Stand) -> None:
    chat = ChatOllama(model="qwen", base_url=stand.ollama_url, num_predict=12, reasoning=True)
    answers = [chat.invoke(f"{number}: {QUESTION}") for number in range(4)]

    assert any(answer.additional_kwargs.get("reasoning_content") for answer in answers)
