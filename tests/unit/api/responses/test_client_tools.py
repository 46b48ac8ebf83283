"""Tools of other types than functions, which the client runs: custom ones, shells, and patches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, ToolCall
from tests.support.agent_chat import AGENT
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.scripted_chat import saying

_PATCH = '*** Begin Patch\n*** Add File: a "b".txt\n+Köln \\ \t\n*** End Patch\n'
_CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Patches files."}
_LARK: Any = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" /b+/'}
_REGEX: Any = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+/[0-9]{2}"}
_SHELL: Any = {"type": "shell", "environment": {"type": "local"}}

_CLIENT_CALLS: list[tuple[Any, str, dict[str, Any], dict[str, Any], Any, str]] = [
    (
        {"type": "local_shell"},
        "local_shell_call",
        {"command": ["ls", "-l"], "working_directory": "/src", "timeout_ms": 1000},
        {
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 1000,
                "user": None,
                "working_directory": "/src",
            }
        },
        {"type": "local_shell_call_output", "id": "CALL", "output": '{"output": "a"}'},
        '{"output": "a"}',
    ),
    (
        _SHELL,
        "shell_call",
        {"commands": ["ls", "pwd"]},
        {"action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
        {
            "type": "shell_call_output",
            "call_id": "CALL",
            "output": [
                {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}},
                {"stdout": "b", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
        "a\n\nstderr: no\nexit code: 2\nb\nThe time was up.",
    ),
    (
        {"type": "apply_patch"},
        "apply_patch_call",
        {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"},
        {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}},
        {"type": "apply_patch_call_output", "call_id": "CALL", "status": "failed"},
        "failed",
    ),
    (
        {"type": "apply_patch"},
        "apply_patch_call",
        {"type": "delete_file", "path": "a.py"},
        {"operation": {"type": "delete_file", "path": "a.py"}},
        {"type": "apply_patch_call_output", "call_id": "CALL", "status": "completed", "output": "gone"},
        "gone",
    ),
]


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
    _engine.script = saying(_call("apply_patch", {"input": _PATCH}))
    return _engine


@pytest.fixture
def client(server: Running, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def _call(name: str, arguments: dict[str, Any]) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"I act.\n<tool_call>\n{written}\n</tool_call>"


def _prompt(engine: FakeEngine) -> ChatPrompt:
    assert isinstance(engine.last.prompt, ChatPrompt)
    return engine.last.prompt


def _function(engine: FakeEngine) -> dict[str, Any]:
    found = _prompt(engine).tools[0]["function"]
    assert isinstance(found, dict)
    return found


# --- custom tools -----------------------------------------------------------------------------------------------------


def test_a_custom_tool_takes_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    response = client.responses.create(model=MODEL, input="Patch.", tools=[_CUSTOM])

    item: Any = response.output[-1]
    assert (item.type, item.name, item.input, item.status) == ("custom_tool_call", "apply_patch", _PATCH, "completed")
    assert item.id.startswith("ctc_")
    assert response.tools[0].to_dict() == _CUSTOM
    assert _function(engine)["description"] == "Patches files."
    assert list(_function(engine)["parameters"]["properties"]) == ["input"]
    assert engine.last.params.grammar is None


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
def test_its_text_is_streamed(client: openai.OpenAI, engine: FakeEngine, cut: int) -> None:
    engine.script = saying(_call("apply_patch", {"input": _PATCH}), piece=cut)
    with client.responses.create(model=MODEL, input="Patch.", tools=[_CUSTOM], stream=True) as stream:
        events: list[Any] = list(stream)

    texts = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert "".join(event.delta for event in texts[:-1]) == _PATCH
    assert (texts[-1].type, texts[-1].input) == ("response.custom_tool_call_input.done", _PATCH)
    assert not any("function_call" in event.type for event in events)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added, done = (
        [event.item for event in events if event.type == f"response.output_item.{stage}"][-1]
        for stage in ("added", "done")
    )
    assert (added.type, added.input, added.id) == ("custom_tool_call", "", texts[0].item_id)
    assert done == events[-1].response.output[-1]


def test_text_in_another_form_comes_as_a_whole(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(_call("apply_patch", {"patch": "a"}))
    with client.responses.create(model=MODEL, input="Patch.", tools=[_CUSTOM], stream=True) as stream:
        texts: list[Any] = [event for event in stream if event.type.startswith("response.custom_tool_call_input")]

    assert [event.type.rpartition(".")[2] for event in texts] == ["delta", "done"]
    assert (texts[0].delta, texts[1].input) == ("a", "a")


def test_its_calls_and_outputs_go_back_in_the_same_words(client: openai.OpenAI, engine: FakeEngine) -> None:
    first = client.responses.create(model=MODEL, input="Patch.", tools=[_CUSTOM])
    item: Any = first.output[-1]
    result: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Done."}
    user: Any = {"role": "user", "content": "Patch."}

    client.responses.create(model=MODEL, input=[user, *first.output, result], tools=[_CUSTOM])  # type: ignore[list-item]
    by_items = _prompt(engine).messages
    client.responses.create(model=MODEL, input=[result], tools=[_CUSTOM], previous_response_id=first.id)
    by_id = _prompt(engine).messages

    call = ToolCall("apply_patch", {"input": _PATCH}, item.call_id)
    for messages in (by_items, by_id):
        said, told = messages[1:]
        assert (said.content, said.tool_calls) == ("I act.", [call])
        assert told == ChatMessage("tool", "Done.", "apply_patch", call_id=item.call_id)


def test_a_regular_expression_is_enforced_and_rules_are_told(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.responses.create(model=MODEL, input="Patch.", tools=[{**_CUSTOM, "format": _REGEX}])
    assert engine.last.params.grammar is not None
    assert _function(engine)["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+/[0-9]{2})$"

    client.responses.create(model=MODEL, input="Patch.", tools=[{**_CUSTOM, "format": _LARK}])
    assert engine.last.params.grammar is None
    assert _function(engine)["description"].endswith(_LARK["definition"])

    client.responses.create(model=MODEL, input="Patch.", tools=[{**_CUSTOM, "format": {"type": "text"}}])
    assert _function(engine)["description"] == "Patches files."


def test_it_can_be_chosen(client: openai.OpenAI, engine: FakeEngine) -> None:
    named: Any = {"type": "custom", "name": "apply_patch"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named, {"type": "web_search"}]}):
        response = client.responses.create(model=MODEL, input="Patch.", tools=[_CUSTOM], tool_choice=choice)
        assert engine.last.params.grammar is not None
        assert response.output[-1].type == "custom_tool_call"


def test_a_large_body_is_answered_alike(client: openai.OpenAI) -> None:
    tool = {**_CUSTOM, "description": "Patches. " * INLINE_BODY_BYTES}
    response = client.responses.create(model=MODEL, input="Patch.", tools=[tool])
    assert response.output[-1].type == "custom_tool_call"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "tools[0].name"),
        ({"format": {"type": "json"}}, "tools[0].format.type"),
        ({"format": {"type": "text", "more": 1}}, "tools[0].format.more"),
        ({"format": {**_LARK, "syntax": "ebnf"}}, "tools[0].format.syntax"),
        ({"format": {**_LARK, "definition": ""}}, "tools[0].format.definition"),
        ({"parameters": {}}, "tools[0].parameters"),
    ],
)
def test_a_custom_tool_that_cannot_be_read_names_its_field(
    client: openai.OpenAI, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Patch.", tools=[{**_CUSTOM, **changes}])
    assert caught.value.param == field


# --- shells and patches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tool", "kind", "arguments", "fields", "output", "told"), _CLIENT_CALLS)
def test_tools_that_the_client_runs_have_items_of_their_own(
    client: openai.OpenAI,
    engine: FakeEngine,
    tool: Any,
    kind: str,
    arguments: dict[str, Any],
    fields: dict[str, Any],
    output: Any,
    told: str,
) -> None:
    engine.script = saying(_call(tool["type"], arguments))
    with client.responses.create(model=MODEL, input="Act.", tools=[tool], stream=True) as stream:
        events: list[Any] = list(stream)
    response = events[-1].response

    item = response.output[-1]
    assert item.type == kind
    shown = item.to_dict()
    assert {name: shown[name] for name in fields} == fields
    assert [event.item for event in events if event.type == "response.output_item.done"][-1] == item
    assert engine.last.params.grammar is not None, "the arguments follow their schema"
    assert [one.to_dict() for one in response.tools] == [tool]

    result = {name: item.call_id if value == "CALL" else value for name, value in output.items()}
    user = {"role": "user", "content": "Act."}
    client.responses.create(model=MODEL, input=[user, *response.output, result], tools=[tool])
    said, answer = _prompt(engine).messages[1:]
    assert json.dumps(said.tool_calls[0].arguments) == json.dumps(arguments)
    assert answer == ChatMessage("tool", told, tool["type"], call_id=item.call_id)


@pytest.mark.parametrize(
    ("tool", "status"), [({"type": "shell"}, "incomplete"), ({"type": "apply_patch"}, "in_progress")]
)
def test_a_call_that_is_cut_is_not_complete(client: openai.OpenAI, engine: FakeEngine, tool: Any, status: str) -> None:
    engine.script = saying(_call(tool["type"], {"commands": ["rm -r build"]})[:-20], reason="length")
    item: Any = client.responses.create(model=MODEL, input="Act.", tools=[tool]).output[-1]

    assert item.status == status
    assert getattr(item, "action", None) is None or item.action.commands == []


def test_a_shell_tells_the_model_its_skills(client: openai.OpenAI, engine: FakeEngine) -> None:
    skills = [{"name": "charts", "description": "Draws charts.", "path": "/skills/charts"}]
    tool: Any = {"type": "shell", "environment": {"type": "local", "skills": skills}}
    client.responses.create(model=MODEL, input="Act.", tools=[tool])

    assert "charts (/skills/charts): Draws charts." in _function(engine)["description"]


def test_a_shell_in_a_container_is_left_out_as_all_that_servers_run(client: openai.OpenAI, engine: FakeEngine) -> None:
    tools: Any = [{"type": "shell", "environment": {"type": "container_auto"}}, _CUSTOM]
    response = client.responses.create(model=MODEL, input="Act.", tools=tools)

    assert [one["function"]["name"] for one in _prompt(engine).tools] == ["apply_patch"]  # type: ignore[index]
    assert [one.type for one in response.tools] == ["custom"]


def test_tools_that_a_search_would_find_are_in_the_prompt(client: openai.OpenAI, engine: FakeEngine) -> None:
    tools: Any = [{"type": "tool_search"}, {**_CUSTOM, "defer_loading": True}]
    client.responses.create(model=MODEL, input="Act.", tools=tools)
    assert [one["function"]["name"] for one in _prompt(engine).tools] == ["apply_patch"]  # type: ignore[index]

    with pytest.raises(openai.BadRequestError, match="tool_search"):
        client.responses.create(
            model=MODEL, input="Act.", tools=[{"type": "tool_search", "execution": "client"}, *tools]
        )


def test_a_computer_is_refused_in_one_sentence(client: openai.OpenAI) -> None:
    tool: Any = {"type": "computer_use_preview", "display_width": 9, "display_height": 9, "environment": "linux"}
    with pytest.raises(openai.BadRequestError, match="images") as caught:
        client.responses.create(model=MODEL, input="Act.", tools=[tool])
    assert caught.value.param == "tools[0].type"


def test_a_shell_can_be_chosen(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(_call("shell", {"commands": ["ls"]}))
    response = client.responses.create(model=MODEL, input="Act.", tools=[_SHELL], tool_choice={"type": "shell"})
    assert response.output[-1].type == "shell_call"


def test_tools_of_one_name_are_refused(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "shell"}, {"type": "custom", "name": "shell"}]
    with pytest.raises(openai.BadRequestError, match="different names"):
        client.responses.create(model=MODEL, input="Act.", tools=tools)


# --- namespaces -------------------------------------------------------------------------------------------------------

_SERVER: Any = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files of the team.",
    "tools": [
        {
            "type": "function",
            "name": "find",
            "description": "Finds.",
            "parameters": {"type": "object"},
            "strict": False,
        },
        {"type": "custom", "name": "write"},
    ],
}


def test_tools_of_a_namespace_are_offered_with_both_names(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = saying(_call("mcp__files__find", {"a": 1}))
    with client.responses.create(model=MODEL, input="Find.", tools=[_SERVER, _CUSTOM], stream=True) as stream:
        events: list[Any] = list(stream)
    response = events[-1].response

    functions: list[Any] = [tool["function"] for tool in _prompt(engine).tools]
    assert [one["name"] for one in functions] == ["mcp__files__find", "mcp__files__write", "apply_patch"]
    assert functions[0]["description"] == "Files of the team.\n\nFinds."
    assert [tool.to_dict() for tool in response.tools] == [_SERVER, _CUSTOM]
    item = response.output[-1]
    assert (item.type, item.namespace, item.name) == ("function_call", "mcp__files__", "find")
    assert [event.name for event in events if event.type == "response.function_call_arguments.done"] == ["find"]

    result = {"type": "function_call_output", "call_id": item.call_id, "output": "None."}
    history: Any = [{"role": "user", "content": "Find."}, *response.output, result]
    client.responses.create(model=MODEL, input=history, tools=[_SERVER, _CUSTOM])
    by_items = _prompt(engine).messages
    client.responses.create(model=MODEL, input=[result], tools=[_SERVER], previous_response_id=response.id)  # type: ignore[list-item]
    for messages in (by_items, _prompt(engine).messages):
        assert messages[1].tool_calls == [ToolCall("mcp__files__find", {"a": 1}, item.call_id)]
        assert messages[2].name == "mcp__files__find"


def test_custom_tools_of_a_namespace_take_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    server = {**_SERVER, "name": "mcp__files"}
    engine.script = saying(_call("mcp__files__write", {"input": "a"}))
    item: Any = client.responses.create(model=MODEL, input="Write.", tools=[server]).output[-1]
    assert (item.type, item.namespace, item.name, item.input) == ("custom_tool_call", "mcp__files", "write", "a")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "tools[0].name"),
        ({"name": "a" * 256}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].tools[0].type"),
        ({"tools": [1]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
        ({"more": 1}, "tools[0].more"),
    ],
)
def test_a_namespace_that_cannot_be_read_names_its_field(
    client: openai.OpenAI, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Find.", tools=[{**_SERVER, **changes}])
    assert caught.value.param == field
