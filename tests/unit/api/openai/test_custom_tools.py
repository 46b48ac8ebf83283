"""Custom tools in OpenAI's chat API: their calls have text instead of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kvtier.engine.process.messages import ChatPrompt, ToolCall
from tests.support.chat_templates import THINKING, answer_text
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, http_client, running
from tests.support.openai_asking import CHAT, chat_body, error_of
from tests.support.scripted_chat import TOOL, hello_with, saying

_USER: Any = [{"role": "user", "content": "patch it"}]
_INPUT = 'one "two"\nthree: Köln'
_CUSTOM: dict[str, Any] = {"name": "patch", "description": "Patches."}
_TOOLS: Any = [TOOL, {"type": "custom", "custom": _CUSTOM}]
_TEXT = answer_text(THINKING, [("patch", {"input": _INPUT}), ("weather", {"town": "Köln"}), ("patch", {"x": "y"})])


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("custom"), hello=hello_with(THINKING)) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine)) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = saying(_TEXT)
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as one:
        yield one


@pytest.fixture
def http(server: Running, engine: FakeEngine) -> Iterator[httpx.Client]:
    with http_client(server) as one:
        yield one


def test_a_call_of_a_custom_tool_has_its_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    [choice] = client.chat.completions.create(model=MODEL, messages=_USER, tools=_TOOLS).choices

    assert choice.finish_reason == "tool_calls"
    shown = [one.to_dict() for one in choice.message.tool_calls or ()]
    assert [one["type"] for one in shown] == ["custom", "function", "custom"]
    assert shown[0]["custom"] == {"name": "patch", "input": _INPUT}
    assert "function" not in shown[0]
    assert shown[2]["custom"] == {"name": "patch", "input": "y"}
    assert isinstance(engine.last.prompt, ChatPrompt)
    assert engine.last.prompt.tools[0] == TOOL
    assert engine.last.prompt.tools[1]["function"]["name"] == "patch"  # type: ignore[index]


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_its_text_is_streamed(client: openai.OpenAI, engine: FakeEngine, piece: int) -> None:
    engine.script = saying(_TEXT, piece=piece)
    chunks = client.chat.completions.create(model=MODEL, messages=_USER, tools=_TOOLS, stream=True, n=2)

    texts: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                given = call.to_dict().get("custom")
                if isinstance(given, dict):
                    assert call.function is None
                    place = (choice.index, call.index)
                    assert ("name" in given) == (place not in texts)
                    texts[place] = texts.get(place, "") + str(given["input"])
    assert texts == {(choice, call): text for choice in (0, 1) for call, text in ((0, _INPUT), (2, "y"))}


def test_its_calls_go_back_in_the_same_words(client: openai.OpenAI, engine: FakeEngine) -> None:
    said = client.chat.completions.create(model=MODEL, messages=_USER, tools=_TOOLS).choices[0].message
    calls = said.tool_calls or []
    history: Any = [*_USER, said, *({"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls)]
    client.chat.completions.create(model=MODEL, messages=history, tools=_TOOLS)

    assert isinstance(engine.last.prompt, ChatPrompt)
    messages = engine.last.prompt.messages
    assert messages[1].tool_calls[0] == ToolCall("patch", {"input": _INPUT}, calls[0].id)
    assert [one.name for one in messages[2:]] == ["patch", "weather", "patch"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ],
)
def test_it_can_be_chosen(http: httpx.Client, engine: FakeEngine, choice: dict[str, Any]) -> None:
    assert http.post(CHAT, json=chat_body(tools=_TOOLS, tool_choice=choice)).status_code == 200
    assert engine.last.params.grammar is not None


def test_a_regular_expression_is_enforced(http: httpx.Client, engine: FakeEngine) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tools = [{"type": "custom", "custom": {**_CUSTOM, "format": form}}]
    assert http.post(CHAT, json=chat_body(tools=tools)).status_code == 200
    assert engine.last.params.grammar is not None


@pytest.mark.parametrize(
    ("custom", "field"),
    [
        ({"name": 1}, "tools[0].custom.name"),
        ({**_CUSTOM, "more": 1}, "tools[0].custom.more"),
        ({**_CUSTOM, "format": {"type": "grammar"}}, "tools[0].custom.format.grammar"),
        ({**_CUSTOM, "format": {"type": "grammar", "grammar": {"syntax": "x"}}}, None),
    ],
)
def test_a_tool_that_cannot_be_read_names_its_field(
    http: httpx.Client, custom: dict[str, Any], field: str | None
) -> None:
    response = http.post(CHAT, json=chat_body(tools=[{"type": "custom", "custom": custom}]))
    assert response.status_code == 400
    assert error_of(response)["param"] == (field or "tools[0].custom.format.grammar.syntax")
