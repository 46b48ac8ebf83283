"""Anthropic's own tools, and blocks of other types than text, as agents send them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from kvtier.engine.process.messages import ChatMessage, ChatPrompt
from tests.support.agent_chat import AGENT
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.scripted_chat import saying

_BASH: Any = {"type": "bash_20250124", "name": "bash"}
_EDITOR: Any = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000}
_OLD_EDITOR: Any = {"type": "text_editor_20250124", "name": "str_replace_editor"}
_MEMORY: Any = {"type": "memory_20250818", "name": "memory", "cache_control": {"type": "ephemeral"}}
_OF_SERVERS: Any = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "web_search_20260318", "name": "web_search"},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
]
_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
_QUESTION: Any = {"role": "user", "content": "Look."}
_PIXEL: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("tools"), hello=AGENT) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(_engine)) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = saying(_CALL)
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as one:
        yield one


def _ask(
    client: anthropic.Anthropic, *tools: Any, messages: Any = (_QUESTION,), **values: Any
) -> anthropic.types.Message:
    asked: Any = {"model": MODEL, "max_tokens": 100, "messages": list(messages), **values}
    return client.messages.create(**asked, tools=list(tools)) if tools else client.messages.create(**asked)


def _functions(engine: FakeEngine) -> dict[str, Any]:
    assert isinstance(engine.last.prompt, ChatPrompt)
    functions: list[Any] = [tool["function"] for tool in engine.last.prompt.tools]
    return {function["name"]: function for function in functions}


def _last_message(engine: FakeEngine) -> ChatMessage:
    assert isinstance(engine.last.prompt, ChatPrompt)
    return engine.last.prompt.messages[-1]


def test_tools_that_the_client_runs_are_functions_for_the_model(
    client: anthropic.Anthropic, engine: FakeEngine
) -> None:
    message = _ask(client, _BASH, _EDITOR, _OLD_EDITOR, _MEMORY)

    [call] = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "bash", {"command": "ls"})  # type: ignore[union-attr]
    functions = _functions(engine)
    assert list(functions) == ["bash", "str_replace_based_edit_tool", "str_replace_editor", "memory"]
    parameters = {name: function["parameters"]["properties"] for name, function in functions.items()}
    assert list(parameters["bash"]) == ["command", "restart"]
    assert "insert_text" in parameters["str_replace_based_edit_tool"]
    assert "insert_text" not in parameters["str_replace_editor"]
    assert "undo_edit" in parameters["str_replace_editor"]["command"]["enum"]
    assert "undo_edit" not in parameters["str_replace_based_edit_tool"]["command"]["enum"]
    assert {"old_path", "new_path", "insert_text"} <= set(parameters["memory"])
    assert engine.last.params.grammar is None


def test_they_can_be_chosen_and_be_strict(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    _ask(client, _BASH, tool_choice={"type": "tool", "name": "bash"})
    assert engine.last.params.grammar is not None
    _ask(client, {**_BASH, "strict": True})
    assert engine.last.params.grammar is not None


def test_tools_that_servers_run_are_left_out(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    _ask(
        client, *_OF_SERVERS, {**_BASH, "defer_loading": True, "allowed_callers": ["direct", "code_execution_20250825"]}
    )
    assert list(_functions(engine)) == ["bash"]
    _ask(client, _MEMORY, {**_BASH, "allowed_callers": ["code_execution_20250825"]})
    assert list(_functions(engine)) == ["memory"]
    count = client.messages.count_tokens(model=MODEL, messages=[_QUESTION], tools=[*_OF_SERVERS, _BASH])
    assert count.input_tokens > 0


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "computer_20250124", "name": "computer"}, "images"),
        ({"type": "bash_2025", "name": "bash"}, "not supported"),
        ({"type": "bash_20250124"}, "name"),
        ({**_BASH, "max_characters": 1}, "max_characters"),
        ({**_BASH, "input_schema": {"type": "object"}}, "input_schema"),
    ],
)
def test_other_tools_are_refused_in_one_sentence(client: anthropic.Anthropic, tool: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words):
        _ask(client, tool)


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "One."}},
            "<document>\nOne.\n</document>\n",
        ),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "citations": {"enabled": False},
                "cache_control": {"type": "ephemeral"},
                "source": {"type": "content", "content": [{"type": "text", "text": "One."}]},
            },
            "<document>\n<title>T</title>\n<context>C</context>\nOne.\n</document>\n",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": "One."}},
            "<document>\nOne.\n</document>\n",
        ),
        (
            {"type": "search_result", "source": "a", "title": "T", "content": [{"type": "text", "text": "One."}]},
            "<search_result>\n<source>a</source>\n<title>T</title>\nOne.\n</search_result>\n",
        ),
    ],
)
def test_documents_with_text_are_text(client: anthropic.Anthropic, engine: FakeEngine, block: Any, text: str) -> None:
    _ask(client, messages=[{"role": "user", "content": [block, {"type": "text", "text": "What?"}]}])
    assert _last_message(engine) == ChatMessage("user", text + "What?")

    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "bash", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    _ask(client, _BASH, messages=[_QUESTION, called, {"role": "user", "content": [result]}])
    assert _last_message(engine) == ChatMessage("tool", text, "bash", call_id="c")


def test_tools_that_a_search_found_have_their_names(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "bash", "input": {}}]}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "memory"}]}
    _ask(client, _BASH, messages=[_QUESTION, called, {"role": "user", "content": [found]}])
    assert _last_message(engine).content == "memory"


def test_what_other_servers_ran_is_left_out_of_the_history(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    answer = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": " It is so."},
    ]
    _ask(client, messages=[_QUESTION, {"role": "assistant", "content": answer}, _QUESTION])

    assert isinstance(engine.last.prompt, ChatPrompt)
    assert engine.last.prompt.messages[1] == ChatMessage("assistant", "I search. It is so.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([_PIXEL], r"messages\[0\].content\[0\] is an image, and models here read text only"),
        ([{"type": "tool_result", "tool_use_id": "c", "content": [_PIXEL]}], r"content\[0\].content\[0\] is an image"),
        ([{"type": "document", "source": {"type": "content", "content": [_PIXEL]}}], r"content\[0\] is an image"),
        ([{"type": "document", "source": {"type": "base64", "data": "AA=="}}], "source.type"),
        ([{"type": "document"}], "source is missing"),
        (
            [{"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}],
            "citations.enabled",
        ),
        ([{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}], "user messages"),
    ],
)
def test_what_no_model_here_reads_is_refused_in_one_sentence(
    client: anthropic.Anthropic, content: Any, words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words):
        _ask(client, messages=[{"role": "user", "content": content}])


_BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("form", ["a block", "a line of a block", "a line of the text"])
def test_a_line_for_accounts_is_not_for_the_model(client: anthropic.Anthropic, engine: FakeEngine, form: str) -> None:
    prompts = []
    for checksum in ("eb6c6", "fa690"):
        line = _BILLING.format(checksum)
        system: dict[str, Any] = {
            "a block": [{"type": "text", "text": line}, {"type": "text", "text": "You code."}],
            "a line of a block": [{"type": "text", "text": f"{line}\nYou code."}],
            "a line of the text": f"{line}\nYou code.",
        }
        _ask(client, system=system[form])
        prompts.append(engine.last.prompt)

    assert prompts[0] == prompts[1]
    assert isinstance(prompts[0], ChatPrompt)
    assert prompts[0].messages[0] == ChatMessage("system", "You code.")
