"""`allowed_tools` as a choice of tools: the prompt keeps them all, and only some can be called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvtier.engine.process.messages import ChatPrompt
from tests.support.chat_templates import THINKING
from tests.support.fake_engine import MODEL, FakeEngine, config_of, fake_engine, http_client, running
from tests.support.openai_asking import CHAT, error_of
from tests.support.scripted_chat import hello_with, saying

RESPONSES = "/v1/responses"
NAMES = ("weather", "add", "stop")
WRAPPED: Any = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
FLAT: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("allowed"), hello=hello_with(THINKING), script=saying("Yes.")) as one:
        yield one


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with running("openai", config_of(engine)) as server, http_client(server) as one:
        yield one


def post(client: httpx.Client, path: str, names: list[str], mode: str = "auto", **changes: object) -> httpx.Response:
    """A request in which tools of these names are allowed."""
    if path == CHAT:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools, **changes}}
        body: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": WRAPPED}
    else:
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in names]}
        choice |= changes
        body = {"input": "hi", "tools": FLAT}
    return client.post(path, json={"model": MODEL, **body, "tool_choice": choice})


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_only_allowed_tools_can_be_called_and_the_prompt_has_all(
    client: httpx.Client, engine: FakeEngine, path: str
) -> None:
    for mode in ("auto", "required"):
        response = post(client, path, ["add", "stop"], mode)

        assert response.status_code == 200, response.text
        prompt, grammar = engine.last.prompt, engine.last.params.grammar
        assert isinstance(prompt, ChatPrompt)
        assert [tool["function"]["name"] for tool in prompt.tools] == list(NAMES)  # type: ignore[index]
        assert grammar is not None
        assert "add" in grammar.text
        assert "stop" in grammar.text
        assert "weather" not in grammar.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_if_all_are_allowed_any_answer_is_right(client: httpx.Client, engine: FakeEngine, path: str) -> None:
    assert post(client, path, list(NAMES)).status_code == 200
    assert engine.last.params.grammar is None


@pytest.mark.parametrize(
    ("names", "changes", "chat_field", "response_field"),
    [
        (["other"], {}, "tool_choice", "tool_choice"),
        ([], {}, "tool_choice.allowed_tools.tools", "tool_choice.tools"),
        (["add"], {"mode": "none"}, "tool_choice.allowed_tools.mode", "tool_choice.mode"),
        (["add"], {"mode": 1}, "tool_choice.allowed_tools.mode", "tool_choice.mode"),
        (["add"], {"more": 1}, "tool_choice.allowed_tools.more", "tool_choice.more"),
        (["add"], {"tools": [1]}, "tool_choice.allowed_tools.tools[0]", "tool_choice.tools[0]"),
        (["add"], {"tools": [{"type": "x"}]}, "tool_choice.allowed_tools.tools[0].type", "tool_choice.tools[0].type"),
        (["add"], {"tools": [{"type": "mcp"}]}, "tool_choice.allowed_tools.tools[0].type", "tool_choice.tools"),
    ],
)
def test_a_choice_that_cannot_be_followed_is_refused_by_name(
    client: httpx.Client, names: list[str], changes: dict[str, object], chat_field: str, response_field: str
) -> None:
    for path, field in ((CHAT, chat_field), (RESPONSES, response_field)):
        response = post(client, path, names, **changes)  # type: ignore[arg-type]
        assert response.status_code == 400
        assert error_of(response)["param"] == field
