"""Tools and thoughts in Ollama's API, as the official client reads them, over an engine without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from kvtier.engine.process.messages import ChatMessage, ChatPrompt, ToolCall
from tests.support.chat_templates import THINKING, answer_text
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.scripted_chat import TOOL, hello_with, saying
from tests.support.waiting import LIMIT_S

USER = {"role": "user", "content": "how is the weather?"}
_CALLS: list[tuple[str, dict[str, object]]] = [("weather", {"town": "Köln", "days": [1, 2]}), ("weather", {})]
_TEXT = answer_text(THINKING, _CALLS, text="I look.", reasoning="Two towns.")


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("tools"), hello=hello_with(THINKING)) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("ollama", config_of(_engine)) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = saying(_TEXT)
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=LIMIT_S) as found:
        yield found


def calls_of(message: ollama.Message) -> list[tuple[str, object]]:
    return [(one.function.name, dict(one.function.arguments)) for one in message.tool_calls or ()]


def prompt_of(engine: FakeEngine) -> ChatPrompt:
    prompt = engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_whole_answer_has_its_calls_and_its_thought(client: ollama.Client) -> None:
    answer = client.chat(MODEL, messages=[USER], tools=[TOOL], think=True)

    assert (answer.message.content, answer.message.thinking) == ("I look.", "Two towns.")
    assert calls_of(answer.message) == _CALLS
    assert (answer.done, answer.done_reason) == (True, "stop")


@pytest.mark.parametrize("piece", [1, 1000])
def test_a_stream_has_each_call_once_it_is_whole(client: ollama.Client, engine: FakeEngine, piece: int) -> None:
    engine.script = saying(_TEXT, piece=piece)

    lines = list(client.chat(MODEL, messages=[USER], tools=[TOOL], stream=True))

    assert "".join(line.message.content or "" for line in lines) == "I look."
    assert "".join(line.message.thinking or "" for line in lines) == "Two towns."
    assert [call for line in lines for call in calls_of(line.message)] == _CALLS
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_text(client: ollama.Client, engine: FakeEngine, stream: bool) -> None:
    engine.script = saying('<tool_call>\n{"name": "weather", "arguments": {"town": "K', reason="length")

    found: Any = client.chat(MODEL, messages=[USER], tools=[TOOL], stream=stream)

    lines = list(found) if stream else [found]
    assert "".join(line.message.content or "" for line in lines) == '{"town": "K'
    assert [call for line in lines for call in calls_of(line.message)] == []


def test_generate_tells_what_the_model_thinks(client: ollama.Client, engine: FakeEngine) -> None:
    engine.script = saying("<think>Hm.</think>\n\nFine.")

    whole = client.generate(MODEL, "hi", think=True)
    lines = list(client.generate(MODEL, "hi", think="low", stream=True))

    assert (whole.response, whole.thinking) == ("Fine.", "Hm.")
    assert "".join(line.response for line in lines) == "Fine."
    assert "".join(line.thinking or "" for line in lines) == "Hm."


@pytest.mark.parametrize(
    ("think", "values"), [(True, {"enable_thinking": True}), (False, {"enable_thinking": False}), (None, {})]
)
def test_think_is_told_to_the_template(
    client: ollama.Client, engine: FakeEngine, think: bool | None, values: dict[str, object]
) -> None:
    answer = client.chat(MODEL, messages=[USER], think=think)

    assert prompt_of(engine).template_values == values
    assert (answer.message.thinking is None) is (think is False)


def test_a_history_with_tools_reaches_the_template(client: ollama.Client, engine: FakeEngine) -> None:
    answer = client.chat(MODEL, messages=[USER], tools=[TOOL])

    client.chat(MODEL, messages=[USER, answer.message, {"role": "tool", "tool_name": "weather", "content": "rain"}])

    _, assistant, tool = prompt_of(engine).messages
    assert (assistant.content, assistant.reasoning) == ("I look.", "Two towns.")
    assert [msg_call(call) for call in assistant.tool_calls] == _CALLS
    assert tool == ChatMessage("tool", "rain", "weather", call_id=assistant.tool_calls[0].call_id)


def msg_call(call: ToolCall) -> tuple[str, dict[str, object]]:
    return call.name, call.arguments


def test_programs_are_told_what_a_model_can_do(client: ollama.Client) -> None:
    assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]
