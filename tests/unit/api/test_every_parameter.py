"""Every parameter of the official clients, in its neutral form and as programs typically send it, is served.

A parameter that a new release of a client adds fails a test until it has a line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import ollama
import pytest
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from kvtier.api.anthropic.requests import read_count, read_message
from kvtier.api.body_messages import ModelSnapshot
from kvtier.api.engines import find_model
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import decode_body
from kvtier.api.ollama import requests as ollama_requests
from kvtier.api.openai.requests import read_chat, read_completion
from kvtier.api.responses.requests import read_response
from kvtier.engine.process.messages import ChatPrompt
from tests.support.agent_chat import AGENT, SCHEMA

_CLIENTS_OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
_REFUSED = object()
"""Marks a parameter of which only the neutral forms are served; `docs/api.md` says so."""

_USER = {"role": "user", "content": "Hi."}
_FUNCTION = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
_FLAT = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
_TOOL = {"name": "add", "input_schema": SCHEMA}
_OPTIONS = {"mode": "explicit", "ttl": "30m"}
_TIERS = ["auto", "default", "flex", "scale", "priority", "fast"]

_CHAT: Mapping[str, Sequence[Any]] = {
    "messages": [[_USER], [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, _USER]],
    "model": ["tiny"],
    "audio": [None, _REFUSED],
    "frequency_penalty": [None, 0, 0.5],
    "function_call": [None, "none", "auto", _REFUSED],
    "functions": [None, [], _REFUSED],
    "logit_bias": [None, {}, {"3": -100}],
    "logprobs": [None, False, True],
    "max_completion_tokens": [None, 9],
    "max_tokens": [None, 9],
    "metadata": [None, {}, {"a": "b"}],
    "modalities": [None, ["text"]],
    "moderation": [None, _REFUSED],
    "n": [None, 1, 2],
    "parallel_tool_calls": [None, True, False],
    "prediction": [None, {"type": "content", "content": "x"}],
    "presence_penalty": [None, 0, 0.5],
    "prompt_cache_key": [None, "session"],
    "prompt_cache_options": [None, {}, _OPTIONS],
    "prompt_cache_retention": [None, "in_memory", "24h"],
    "reasoning_effort": [None, "none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "response_format": [
        None,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
    "safety_identifier": [None, "x"],
    "seed": [None, 1],
    "service_tier": [None, *_TIERS],
    "stop": [None, [], "x", ["x", "y"]],
    "store": [None, False, True],
    "stream": [None, False, True],
    "stream_options": [None],
    "temperature": [None, 0, 1, 2],
    "tool_choice": [None, "none", "auto"],
    "tools": [None, [], [_FUNCTION], [{"type": "custom", "custom": {"name": "patch"}}]],
    "top_logprobs": [None, 0],
    "top_p": [None, 1, 0.9],
    "user": [None, "x"],
    "verbosity": [None, "low", "medium", "high"],
    "web_search_options": [None, _REFUSED],
    # of other servers
    "chat_template_kwargs": [None, {}, {"enable_thinking": False}],
    "enable_thinking": [None, True, False],
    "thinking": [None, {"type": "enabled"}, {"type": "disabled"}, {"type": "enabled", "clear_thinking": False}],
}
_COMPLETION: Mapping[str, Sequence[Any]] = {
    **{name: _CHAT[name] for name in ("model", "frequency_penalty", "logit_bias", "max_tokens", "n", "seed", "stop")},
    **{name: _CHAT[name] for name in ("presence_penalty", "stream", "stream_options", "temperature", "top_p", "user")},
    "prompt": ["x", ["x", "y"], [1, 2], [[1], [2]]],
    "best_of": [None, 1],
    "echo": [None, False, True],
    "logprobs": [None, 0, 5],
    "suffix": [None, "", "x"],
}
_RESPONSE: Mapping[str, Sequence[Any]] = {
    **{
        name: _CHAT[name] for name in ("model", "metadata", "parallel_tool_calls", "prompt_cache_key", "user", "stream")
    },
    **{name: _CHAT[name] for name in ("prompt_cache_retention", "safety_identifier", "store", "temperature", "top_p")},
    **{name: _CHAT[name] for name in ("stream_options", "moderation", "tool_choice")},
    "access_programs": [None, {"cyber": "standard"}],
    "background": [None, False, _REFUSED],
    "client_metadata": [None, {}, {"session_id": "x"}],
    "context_management": [None, [], [{"type": "compaction", "compact_threshold": 100_000}]],
    "conversation": [None, _REFUSED],
    "image": [None, {"context_compression": "auto"}],
    "include": [None, [], ["reasoning.encrypted_content", "message.output_text.logprobs", "web_search_call.results"]],
    "input": ["Hi.", [_USER], [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}]],
    "instructions": [None, "", "Be brief."],
    "max_output_tokens": [None, 9],
    "max_tool_calls": [None, 3],
    "previous_response_id": [None],
    "prompt": [None, _REFUSED],
    "prompt_cache_options": [None, {}, {**_OPTIONS, "comparison_response_id": None, "prewarm": False}],
    "reasoning": [
        None,
        {},
        {"effort": "low", "summary": "auto"},
        {"effort": None, "context": "auto", "mode": "standard"},
    ],
    "service_tier": [None, *_TIERS, "ultrafast"],
    "text": [None, {}, {"format": {"type": "text"}, "verbosity": "low"}, {"verbosity": "medium"}],
    "tools": [None, [], [_FLAT], [{"type": "custom", "name": "patch"}], [{"type": "web_search"}]],
    "top_logprobs": [None, 0, 5],
    "truncation": [None, "auto", "disabled"],
}
_COUNT: Mapping[str, Sequence[Any]] = {
    "messages": [[_USER], [_USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}, _USER]],
    "model": ["tiny"],
    "cache_control": [None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}],
    "output_config": [None, {}, {"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}],
    "output_format": [None, {"type": "json_schema", "schema": SCHEMA}],
    "speed": [None, "standard", "fast"],
    "system": [None, "", "x", [], [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]],
    "thinking": [None, {"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}],
    "tool_choice": [None, {"type": "auto"}, {"type": "none"}],
    "tools": [None, [], [_TOOL], [{"type": "bash_20250124", "name": "bash"}]],
    "user_profile_id": [None, "x"],
    "workspace_id": [None, "x"],
}
_MESSAGE: Mapping[str, Sequence[Any]] = {
    **{name: values for name, values in _COUNT.items() if name != "output_format"},
    "max_tokens": [9],
    "container": [None, _REFUSED],
    "diagnostics": [None, {}, {"previous_message_id": None}, {"previous_message_id": "msg_1"}],
    "inference_geo": [None, "eu"],
    "metadata": [None, {}, {"user_id": None}, {"user_id": "x"}],
    "service_tier": [None, "auto", "standard_only"],
    "stop_sequences": [None, [], ["x"]],
    "stream": [None, False, True],
    # the client's for other releases of the API
    "temperature": [None, 0, 1],
    "top_k": [None, 5],
    "top_p": [None, 0.9],
}
_OLLAMA: Mapping[str, Sequence[Any]] = {
    "model": ["tiny"],
    "stream": [None, True, False],
    "think": [None, True, False, "low"],
    "logprobs": [None, False, True],
    "top_logprobs": [None],
    "format": [None, "", "json", SCHEMA],
    "options": [None, {}, {"num_ctx": 4096, "temperature": 0, "mirostat": 0, "repeat_last_n": 64, "num_gpu": 1}],
    "keep_alive": [None, "5m", 0, -1],
}
_OLLAMA_CHAT = {
    **_OLLAMA,
    "messages": [[_USER], [{**_USER, "images": []}]],
    "tools": [None, [], [_FUNCTION]],
}
_OLLAMA_GENERATE: Mapping[str, Sequence[Any]] = {
    **_OLLAMA,
    "prompt": ["Hi."],
    "suffix": [None, "", "x"],
    "system": [None, "", "x"],
    "template": [None, "", _REFUSED],
    "context": [None, [], _REFUSED],
    "raw": [None, False, True],
    "images": [None, [], _REFUSED],
    "width": [None, 0],
    "height": [None, 0],
    "steps": [None, 0],
}
_APIS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any], Mapping[str, Sequence[Any]]]] = {
    "chats": (ChatCompletions.create, read_chat, _CHAT),
    "completions": (Completions.create, read_completion, _COMPLETION),
    "responses": (Responses.create, read_response, _RESPONSE),
    "messages": (Messages.create, read_message, _MESSAGE),
    "counts": (Messages.count_tokens, read_count, _COUNT),
    "ollama chats": (ollama.Client.chat, ollama_requests.read_chat, _OLLAMA_CHAT),
    "ollama texts": (ollama.Client.generate, ollama_requests.read_generate, _OLLAMA_GENERATE),
}
_CASES = [
    pytest.param(read, values, name, value, id=f"{api}-{name}-{number}")
    for api, (_, read, values) in _APIS.items()
    for name, given in values.items()
    for number, value in enumerate(given)
    if value is not _REFUSED
]


class _Catalog:
    models: Sequence[ModelSnapshot] = (ModelSnapshot(["tiny"], {}, AGENT),)
    known = "tiny"

    def find(self, name: str) -> ModelSnapshot:
        return find_model(self.models, name)


def _read(read: Callable[..., Any], values: Mapping[str, Sequence[Any]], **fields: object) -> Any:
    needed = {name: given[0] for name, given in values.items() if given[0] is not None}
    return read(decode_body(msgspec.json.encode({**needed, **fields})), _Catalog())


@pytest.mark.parametrize(("create", "read", "values"), _APIS.values(), ids=_APIS)
def test_no_parameter_is_forgotten(create: Callable[..., Any], read: object, values: Mapping[str, Any]) -> None:
    assert set(inspect.signature(create).parameters) - _CLIENTS_OWN <= set(values)


@pytest.mark.parametrize(("read", "values", "name", "value"), _CASES)
def test_a_parameter_is_served(read: Callable[..., Any], values: Mapping[str, Any], name: str, value: object) -> None:
    assert isinstance(_read(read, values, **{name: value}), GenerationRequest)


@pytest.mark.parametrize(
    ("fields", "is_on"),
    [
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_thinking_is_switched_in_the_words_of_other_servers(fields: dict[str, object], is_on: bool) -> None:
    prompt = _read(read_chat, _CHAT, **fields).prompts[0]
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_values["enable_thinking"] is is_on


def test_a_switch_that_the_template_does_not_know_has_no_effect() -> None:
    plain = ModelSnapshot(
        ["tiny"], {}, msgspec.structs.replace(AGENT, chat_template="{{ messages }}", tool_template="")
    )

    class _Plain(_Catalog):
        models = (plain,)

    body = {"model": "tiny", "messages": [_USER]}
    without, switched = (
        read_chat(decode_body(msgspec.json.encode(one)), _Plain()).prompts
        for one in (body, {**body, "enable_thinking": False})
    )
    assert switched == without


def test_how_much_the_model_says_is_told_to_its_template() -> None:
    for read, values, fields in (
        (read_chat, _CHAT, {"verbosity": "low"}),
        (read_response, _RESPONSE, {"text": {"verbosity": "low"}}),
    ):
        assert _read(read, values, **fields).prompts[0].template_values["verbosity"] == "low"


def test_items_of_tools_that_other_servers_ran_are_left_out() -> None:
    kinds = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_call", "tool_search_output")
    items = [{"type": kind, "id": "x", "status": "completed"} for kind in kinds]
    asked = _read(read_response, _RESPONSE, input=[_USER, *items, {"role": "assistant", "content": "So."}, _USER])
    assert [message.content for message in asked.prompts[0].messages] == ["Hi.", "So.", "Hi."]


def test_a_prompt_without_an_answer_is_refused() -> None:
    with pytest.raises(HttpError, match="prewarm"):
        _read(read_response, _RESPONSE, prompt_cache_options={"prewarm": True})
