"""Sessions of three turns as coding agents send them: each turn's prompt finds all full blocks of the turn before.

The bodies have the fields that the agents' public sources and captured requests show; texts, ids and results are made
up. The model is a random one, which calls nothing: what it would have called is made up, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.testing.tiny_models import save_tiny_model
from tests.support.chat_templates import THINKING
from tests.support.deployments import DeploymentProcess

pytestmark = pytest.mark.slow

_MODEL = "tiny"
_NUM_TURNS = 3
_BLOCK_TOKENS = 16
_DEPLOYMENT = """\
models:
  - model: tiny
    kv_cache_space: 128MiB
    default_options:
      max_tokens: 3
"""
_LIMIT_S = 120.0
_RULES = "You are a coding agent. Read before you write, run the tests, and say what you did in a few words. " * 6
_COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
_PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x = {0}\n+x = {1}\n*** End Patch\n"
_GRAMMAR = 'start: begin hunk+ end\nbegin: "*** Begin Patch" LF\nend: "*** End Patch" LF?\n%import common.LF'


@dataclass(frozen=True, slots=True)
class _Agent:
    """`body` is the request of a turn, after `history`; `turn` is what the history then has of that turn."""

    path: str
    headers: Mapping[str, str]
    body: Callable[[int, list[Any]], dict[str, Any]]
    begin: Callable[[], list[Any]]
    turn: Callable[[int], list[Any]]


# --- Codex CLI --------------------------------------------------------------------------------------------------------


def _codex_text(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _codex_begin() -> list[Any]:
    return [
        _codex_text("developer", "<permissions>Files in the workspace may be changed.</permissions>"),
        _codex_text("user", "<environment_context>\n  <cwd>/src</cwd>\n  <shell>bash</shell>\n</environment_context>"),
        _codex_text("user", "Codex: make x one larger."),
    ]


def _codex_turn(number: int) -> list[Any]:
    shell, patch = f"call_shell_{number}", f"call_patch_{number}"
    return [
        {"type": "reasoning", "summary": [], "encrypted_content": "a3Z0aWVyOg==", "content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": f"Step {number}."}],
            "phase": "commentary",
        },
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command": ["cat", "a.py"], "workdir": "/src"}',
            "call_id": shell,
        },
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": patch,
            "name": "apply_patch",
            "input": _PATCH.format(number, number + 1),
        },
        {
            "type": "function_call",
            "name": "find",
            "namespace": "mcp__files__",
            "arguments": '{"command": ["a.py"]}',
            "call_id": f"call_find_{number}",
        },
        {"type": "function_call_output", "call_id": f"call_find_{number}", "output": "a.py"},
        {"type": "function_call_output", "call_id": shell, "output": f"x = {number}\n"},
        {"type": "custom_tool_call_output", "call_id": patch, "output": "Success."},
    ]


def _codex_body(number: int, history: list[Any]) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "instructions": _RULES,
        "input": history,
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": _COMMAND},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edits files.",
                "format": {"type": "grammar", "syntax": "lark", "definition": _GRAMMAR},
            },
            {
                "type": "namespace",
                "name": "mcp__files__",
                "description": "Files of the team.",
                "tools": [{"type": "function", "name": "find", "strict": False, "parameters": _COMMAND}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-codex",
        "text": {"verbosity": "medium"},
        "client_metadata": {"session_id": "0199-codex", "turn": str(number)},
    }


# --- Claude Code ------------------------------------------------------------------------------------------------------

_EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def _claude_begin() -> list[Any]:
    reminder = {"type": "text", "text": "<system-reminder>\nToday there are no notes.\n</system-reminder>\n"}
    return [{"role": "user", "content": [reminder, {"type": "text", "text": "Claude: make x one larger."}]}]


def _claude_turn(number: int) -> list[Any]:
    call = f"toolu_{number}"
    said = [
        {"type": "thinking", "thinking": f"Step {number}.", "signature": "kvtier"},
        {"type": "text", "text": f"I read a.py, {number}."},
        {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": ["cat", "a.py"]}},
    ]
    result = [{"type": "tool_result", "tool_use_id": call, "content": f"x = {number}\n", "is_error": False}]
    return [{"role": "assistant", "content": said}, {"role": "user", "content": result}]


def _claude_body(number: int, history: list[Any]) -> dict[str, Any]:
    """The line for accounts changes with every request, and the last message's mark moves."""
    messages = json.loads(json.dumps(history))
    messages[-1]["content"][-1] |= _EPHEMERAL
    line = f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={number:05x};"
    return {
        "model": _MODEL,
        "max_tokens": 3,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": line},
            {"type": "text", "text": "You code.", **_EPHEMERAL},
            {"type": "text", "text": _RULES, **_EPHEMERAL},
        ],
        "messages": messages,
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **_COMMAND},
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    }


# --- agents over chats ------------------------------------------------------------------------------------------------


def _chat_begin(name: str, *, in_parts: bool = False) -> list[Any]:
    question = f"{name}: make x one larger."
    content: object = [{"type": "text", "text": question}] if in_parts else question
    return [{"role": "system", "content": _RULES}, {"role": "user", "content": content}]


def _called_turn(number: int) -> list[Any]:
    call = f"call_{number}"
    function = {"name": "bash", "arguments": '{"command": ["cat", "a.py"]}'}
    said = {
        "role": "assistant",
        "content": "",
        "reasoning_content": f"Step {number}.",
        "tool_calls": [{"id": call, "type": "function", "function": function}],
    }
    return [said, {"role": "tool", "tool_call_id": call, "content": f"x = {number}\n"}]


def _opencode_body(number: int, history: list[Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": _COMMAND}}
    return {
        "model": _MODEL,
        "max_tokens": 3,
        "temperature": 0,
        "top_p": 1,
        "messages": history,
        "tools": [tool],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _cline_turn(number: int) -> list[Any]:
    """Its calls are XML in the text, and a call's result is a message of the user's."""
    said = f"<read_file>\n<path>a.py</path>\n</read_file>\n\n{number}"
    result = [
        {"type": "text", "text": "[read_file for 'a.py'] Result:"},
        {"type": "text", "text": f"x = {number}"},
        {"type": "text", "text": f"<environment_details>\n# Turn {number}\n</environment_details>"},
    ]
    return [{"role": "assistant", "content": said}, {"role": "user", "content": result}]


def _cline_body(number: int, history: list[Any]) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "messages": history,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _aider_turn(number: int) -> list[Any]:
    """Without the reminder that it may repeat behind the last message: no later prompt has it there again."""
    said = f"a.py\n```python\n<<<<<<< SEARCH\nx = {number}\n=======\nx = {number + 1}\n>>>>>>> REPLACE\n```"
    return [{"role": "assistant", "content": said}, {"role": "user", "content": f"And once more, {number}."}]


def _aider_body(number: int, history: list[Any]) -> dict[str, Any]:
    body = {"model": _MODEL, "messages": history, "temperature": 0, "stream": True}
    return {**body, "stream_options": {"include_usage": True}}


_AGENTS = {
    "Codex CLI": _Agent(
        "/v1/responses",
        {"originator": "codex_cli_rs", "session-id": "0199-codex", "accept": "text/event-stream"},
        _codex_body,
        _codex_begin,
        _codex_turn,
    ),
    "Claude Code": _Agent(
        "/v1/messages?beta=true",
        {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
        _claude_body,
        _claude_begin,
        _claude_turn,
    ),
    "opencode": _Agent("/v1/chat/completions", {}, _opencode_body, lambda: _chat_begin("opencode"), _called_turn),
    "Cline": _Agent("/v1/chat/completions", {}, _cline_body, lambda: _chat_begin("Cline", in_parts=True), _cline_turn),
    "aider": _Agent("/v1/chat/completions", {}, _aider_body, lambda: _chat_begin("aider"), _aider_turn),
}


# --- the sessions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder: Path = tmp_path_factory.mktemp("coding")
    save_tiny_model(folder / _MODEL, "llama", max_position_embeddings=32_768)
    (folder / _MODEL / "chat_template.jinja").write_text(THINKING)
    with DeploymentProcess(folder, _DEPLOYMENT) as running:
        yield running


@pytest.fixture
def server(deployment: DeploymentProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.openai_url, timeout=_LIMIT_S) as client:
        yield client


def _usage(server: httpx.Client, agent: _Agent, body: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and how many of them were cached, as the end of the stream has them."""
    reply = server.post(agent.path, json=body, headers=dict(agent.headers))
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert not any(event.get("error") for event in events), events[-1]
    if "/responses" in agent.path:
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    if "/messages" in agent.path:
        usage = next(event["usage"] for event in events if event["type"] == "message_delta")
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached
    usage = events[-1]["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("name", _AGENTS)
def test_each_turn_of_an_agent_finds_the_turn_before(server: httpx.Client, name: str) -> None:
    agent = _AGENTS[name]
    history, before = agent.begin(), 0
    for number in range(_NUM_TURNS):
        tokens, cached = _usage(server, agent, agent.body(number, history))
        assert tokens > before + _BLOCK_TOKENS
        assert cached >= before // _BLOCK_TOKENS * _BLOCK_TOKENS
        before = tokens
        history += agent.turn(number)
