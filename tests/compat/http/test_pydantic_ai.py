"""Pydantic AI over chats and Responses: answers that have a type, by a call or by a schema, and tools.

Its model for Messages is left out: with the release that goes with the other clients, it fails before it asks.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANSWER, CALLED, QUESTION, SYSTEM, Forecast, forecast

_KINDS: dict[str, Any] = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


def _served(stand: Stand, model: str, kind: str) -> Model:
    client = openai.AsyncOpenAI(base_url=stand.v1, api_key="none", max_retries=0)
    served: Model = _KINDS[kind](model, provider=OpenAIProvider(openai_client=client))
    return served


@pytest.fixture(params=_KINDS)
def served(request: pytest.FixtureRequest, stand: Stand, model: str) -> Model:
    return _served(stand, model, request.param)


def test_an_answer_that_comes_as_a_call_has_its_type(served: Model) -> None:
    agent: Agent[Any, Any] = Agent(served, output_type=ToolOutput(Forecast), instructions=SYSTEM, retries=0)

    assert isinstance(agent.run_sync(QUESTION).output, Forecast)


def test_an_answer_that_follows_a_schema_has_its_type(stand: Stand, model: str) -> None:
    client = openai.AsyncOpenAI(base_url=stand.v1, api_key="none", max_retries=0)
    served = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
    agent: Agent[Any, Any] = Agent(served, output_type=NativeOutput(Forecast), instructions=SYSTEM, retries=0)

    assert isinstance(agent.run_sync(QUESTION).output, Forecast)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_tool_is_called_and_its_result_taken(stand: Stand, kind: str) -> None:
    served = _served(stand, "caller", kind)
    agent: Agent[Any, Any] = Agent(served, output_type=str, instructions=SYSTEM, retries=0)
    calls = []

    @agent.tool_plain
    def get_weather(place: str, days: int) -> str:
        """How the weather will be."""
        calls.append({"place": place, "days": days})
        return forecast(place, days)

    assert agent.run_sync(QUESTION).output == ANSWER
    assert calls == [CALLED]
