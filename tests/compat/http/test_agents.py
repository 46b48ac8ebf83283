"""OpenAI's Agents SDK with its defaults, which is Responses, and over chats: a tool is called, then comes an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import ANSWER, CALLED, QUESTION, SYSTEM, Forecast, forecast

_MAX_TURNS = 20
"""Random weights may call again, of themselves."""


class _Tool:
    """The tool, and what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def as_function(self) -> agents.Tool:
        @agents.function_tool
        def get_weather(place: str, days: int) -> str:
            """How the weather will be."""
            self.calls.append((place, days))
            return forecast("Oslo", 3)

        return get_weather


def _run(stand: Stand, agent_of: Any) -> agents.RunResult:
    async def run() -> agents.RunResult:
        async with openai.AsyncOpenAI(base_url=stand.v1, api_key="none", max_retries=0) as client:
            return await agents.Runner.run(agent_of(client), QUESTION, max_turns=_MAX_TURNS)

    return asyncio.run(run())


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_an_agent_calls_its_tool_and_answers(stand: Stand, model: str, api: str) -> None:
    tool = _Tool()

    def agent_of(client: openai.AsyncOpenAI) -> agents.Agent[Any]:
        kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
        return agents.Agent(
            name="Weather",
            instructions=SYSTEM,
            model=kind(model=model, openai_client=client),
            model_settings=settings,
            tools=[tool.as_function()],
        )

    result = _run(stand, agent_of)

    assert tool.calls
    assert isinstance(result.final_output, str)
    assert result.context_wrapper.usage.requests > 1


def test_an_agent_with_its_defaults_calls_and_answers(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the environment says where: neither a client nor a choice of tools is given."""
    monkeypatch.setenv("OPENAI_BASE_URL", stand.v1)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    tool = _Tool()
    agent = agents.Agent(name="Weather", instructions=SYSTEM, model="caller", tools=[tool.as_function()])

    result = asyncio.run(agents.Runner.run(agent, QUESTION))

    assert tool.calls == [(CALLED["place"], CALLED["days"])]
    assert result.final_output == ANSWER


def test_the_answer_of_an_agent_has_its_type(stand: Stand, model: str) -> None:
    def agent_of(client: openai.AsyncOpenAI) -> agents.Agent[Any]:
        served = agents.OpenAIResponsesModel(model=model, openai_client=client)
        return agents.Agent(name="Weather", instructions=SYSTEM, model=served, output_type=Forecast)

    assert isinstance(_run(stand, agent_of).final_output, Forecast)


def test_an_agent_is_streamed(stand: Stand) -> None:
    async def run() -> tuple[list[str], agents.RunResultStreaming]:
        async with openai.AsyncOpenAI(base_url=stand.v1, api_key="none", max_retries=0) as client:
            served = agents.OpenAIResponsesModel(model="qwen", openai_client=client)
            agent = agents.Agent(
                name="Weather",
                model=served,
                model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
                tools=[_Tool().as_function()],
            )
            result = agents.Runner.run_streamed(agent, QUESTION, max_turns=_MAX_TURNS)
            return [event.type async for event in result.stream_events()], result

    kinds, result = asyncio.run(run())

    assert "raw_response_event" in kinds
    assert isinstance(result.final_output, str)
