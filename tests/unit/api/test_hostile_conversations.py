"""Hostile bodies of responses and messages: each is served, or refused in one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.api.anthropic.requests import read_count, read_message
from kvtier.api.body_messages import ModelSnapshot
from kvtier.api.engines import ModelCatalog, find_model
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, decode_body
from kvtier.api.limits import MAX_INPUT_ITEMS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from kvtier.api.response_store import ResponseStore
from kvtier.api.responses.history import continued
from kvtier.api.responses.record import decode_record
from kvtier.api.responses.requests import read_response
from kvtier.engine.process.messages import encode_part
from kvtier.errors import KvtierError
from tests.support.agent_chat import AGENT

_Read = Callable[[JsonBody, ModelCatalog], GenerationRequest]


class _Catalog:
    """A model that thinks and calls tools."""

    models: Sequence[ModelSnapshot] = (ModelSnapshot(["tiny"], {}, AGENT),)
    known = "tiny"

    def find(self, name: str) -> ModelSnapshot:
        return find_model(self.models, name)


def _outcome(read: _Read, document: object) -> GenerationRequest | HttpError | KvtierError:
    """The request or the error for a body sent over the wire; a request can be sent to an engine."""
    try:
        asked = read(decode_body(msgspec.json.encode(document)), _Catalog())
        if read is read_response:
            asked, _ = continued(asked, decode_record(asked.record), ResponseStore().of(""))
    except (HttpError, KvtierError) as error:
        return _with_a_sentence(error)
    for prompt in asked.prompts:
        if not hasattr(prompt, "encoded"):
            encode_part(prompt)  # type: ignore[arg-type]
    encode_part(asked.params)
    return asked


def _with_a_sentence(error: HttpError | KvtierError) -> HttpError | KvtierError:
    assert str(error)
    assert "\n" not in str(error)
    return error


_RESPONSE: dict[str, Any] = {"model": "tiny", "input": "Hi."}
_MESSAGE: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}]}
_BODIES: list[tuple[_Read, dict[str, Any]]] = [(read_response, _RESPONSE), (read_message, _MESSAGE)]
_IDS = ["responses", "messages"]


def test_the_bodies_that_are_altered_are_right_ones() -> None:
    for read, body in _BODIES:
        assert isinstance(_outcome(read, body), GenerationRequest)
    assert isinstance(_outcome(read_count, {name: _MESSAGE[name] for name in ("model", "messages")}), GenerationRequest)


# --- random JSON ------------------------------------------------------------------------------------------------------

_WORDS = [
    *("type", "role", "content", "text", "id", "name", "arguments", "call_id", "output", "input", "summary", "format"),
    *(
        "schema",
        "parameters",
        "strict",
        "tool_use_id",
        "thinking",
        "signature",
        "cache_control",
        "ttl",
        "effort",
        "data",
    ),
    *(
        "action",
        "operation",
        "commands",
        "command",
        "path",
        "diff",
        "source",
        "title",
        "outcome",
        "definition",
        "syntax",
    ),
    *("input_schema", "description", "encrypted_content", "is_error", "display", "budget_tokens", "user_id"),
]
_VALUES = [
    *("message", "function", "function_call", "function_call_output", "reasoning", "item_reference", "input_text"),
    *("output_text", "user", "assistant", "system", "tool", "text", "tool_use", "tool_result", "thinking", "image"),
    *("custom_tool_call", "shell_call", "shell_call_output", "apply_patch_call", "local_shell_call", "shell", "custom"),
    *(
        "namespace",
        "grammar",
        "regex",
        "lark",
        "update_file",
        "document",
        "search_result",
        "bash_20250124",
        "memory_20250818",
    ),
    *("json_schema", "ephemeral", "auto", "any", "none", "required", "enabled", "low", "add", "{}", '{"a": 1}', ""),
]
_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(_VALUES),
    st.text(max_size=8),
)
_json = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_WORDS) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=24,
)
_FIELDS = {
    read_response: [
        *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include"),
        *("max_output_tokens", "temperature", "top_p", "top_logprobs", "metadata", "store", "previous_response_id"),
        *("truncation", "stream", "stream_options", "user", "service_tier", "background", "prompt_cache_options"),
    ],
    read_message: [
        *("messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "max_tokens"),
        *("stop_sequences", "temperature", "top_p", "top_k", "metadata", "service_tier", "stream", "cache_control"),
    ],
}
_kinds = st.sampled_from(_BODIES)


@settings(max_examples=400, deadline=None)
@given(kind=_kinds, data=st.data())
def test_random_values_of_known_fields_are_served_or_refused(
    kind: tuple[_Read, dict[str, Any]], data: st.DataObject
) -> None:
    read, body = kind
    fields = data.draw(st.dictionaries(st.sampled_from(_FIELDS[read]), _json, min_size=1, max_size=3))
    outcome = _outcome(read, {**body, **fields})
    assert isinstance(outcome, (GenerationRequest, HttpError, KvtierError))
    if read is read_message:
        counted = _outcome(
            read_count, {name: value for name, value in {**body, **fields}.items() if name != "max_tokens"}
        )
        assert isinstance(counted, (GenerationRequest, HttpError, KvtierError))


_items = st.lists(st.dictionaries(st.sampled_from(_WORDS), _json, min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(items=_items)
def test_random_items_and_blocks_are_served_or_refused(items: list[dict[str, Any]]) -> None:
    bodies: list[tuple[_Read, dict[str, Any]]] = [
        (read_response, {**_RESPONSE, "input": items}),
        (read_response, {**_RESPONSE, "tools": items}),
        (read_message, {**_MESSAGE, "messages": items}),
        (read_message, {**_MESSAGE, "messages": [{"role": "assistant", "content": items}, *_MESSAGE["messages"]]}),
        (read_message, {**_MESSAGE, "messages": [{"role": "user", "content": items}]}),
        (read_message, {**_MESSAGE, "tools": items, "system": items}),
    ]
    for read, body in bodies:
        assert isinstance(_outcome(read, body), (GenerationRequest, HttpError, KvtierError))


# --- out of bounds ----------------------------------------------------------------------------------------------------


def _nested(depth: int) -> object:
    return functools.reduce(lambda inner, _: {"a": [inner]}, range(depth), {})


_DEEP, _WIDE = _nested(100), {str(number): number for number in range(70_000)}
_USER = {"role": "user", "content": "Hi."}
_REFUSED_RESPONSES: list[tuple[str, object]] = [
    ("input", []),
    ("input", 7),
    ("input", [_USER] * (MAX_INPUT_ITEMS + 1)),
    ("input", [[]]),
    ("input", [{"type": "web_search_call", "id": "x"}]),
    ("input", [{"role": "robot", "content": "Hi."}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]),
    ("input", [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * (MAX_PARTS + 1)}]),
    ("input", [{"type": "function_call", "name": "a" * 300, "arguments": "{}", "call_id": "c"}]),
    ("input", [{"type": "function_call_output", "output": "x"}]),
    ("input", [{"type": "item_reference", "id": "msg_0_0"}]),
    ("tools", [{"type": "function", "name": f"f{number}"} for number in range(MAX_TOOLS + 1)]),
    ("tools", [{"type": "function", "name": "f"}] * 2),
    ("tools", [{"type": "function", "name": "f", "parameters": _DEEP}]),
    ("tools", [{"type": "function", "name": "f", "parameters": _WIDE}]),
    ("tools", [{"type": "computer"}]),
    ("tools", [{"type": ["web_search"]}]),
    ("tools", [{"type": "custom"}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("tool_choice", {"type": "file_search"}),
    ("text", {"format": {"type": "json_schema", "schema": _DEEP, "name": "x"}}),
    ("text", {"format": {"type": "grammar"}}),
    ("text", {"verbosity": "much"}),
    ("context_management", [{"type": "clear"}]),
    ("prompt_cache_options", {"prewarm": True}),
    ("reasoning", {"effort": "much"}),
    ("include", ["all"]),
    ("max_output_tokens", 0),
    ("max_output_tokens", 1 << 40),
    ("temperature", 2.5),
    ("top_logprobs", 21),
    ("metadata", {"a": 1}),
    ("metadata", {"a": "x" * 2000}),
    ("previous_response_id", "x" * 300),
    ("previous_response_id", "resp_unknown"),
    ("truncation", "middle"),
    ("background", True),
    ("conversation", "conv_1"),
    ("prompt", {"id": "pmpt_1"}),
    ("stream_options", {"include_obfuscation": False}),
    ("n", 2),
    ("frequency", 1),
]


@pytest.mark.parametrize(("name", "value"), _REFUSED_RESPONSES)
def test_a_response_that_cannot_be_made_is_refused_by_the_field(name: str, value: object) -> None:
    outcome = _outcome(read_response, {**_RESPONSE, name: value})

    assert isinstance(outcome, (HttpError, KvtierError))
    assert not isinstance(outcome, HttpError) or outcome.status in (400, 404)
    assert name in str(outcome)


def _blocks(*blocks: object, role: str = "user") -> list[object]:
    return [{"role": role, "content": list(blocks)}, *([_USER] if role == "assistant" else [])]


_REFUSED_MESSAGES: list[tuple[str, object]] = [
    ("messages", []),
    ("messages", "Hi."),
    ("messages", [_USER] * (MAX_MESSAGES + 1)),
    ("messages", [_USER, {"role": "assistant", "content": "The answer is ("}]),
    ("messages", [{"role": "tool", "content": "Hi."}]),
    ("messages", _blocks({"type": "image", "source": {}})),
    ("messages", _blocks(*[{"type": "text", "text": "x"}] * (MAX_PARTS + 1))),
    ("messages", _blocks({"type": "tool_use", "id": "a", "name": "f", "input": {}})),
    ("messages", _blocks({"type": "tool_use", "id": "a", "name": "f", "input": _DEEP}, role="assistant")),
    ("messages", _blocks({"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, role="assistant")),
    ("messages", _blocks({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})),
    ("messages", _blocks({"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1y"}})),
    ("system", [{"type": "image"}]),
    ("tools", [{"name": "f"}]),
    ("tools", [{"name": "f", "input_schema": _DEEP}]),
    ("tools", [{"name": "f", "input_schema": {}}] * 2),
    ("tools", [{"type": "computer_20250124", "name": "computer"}]),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "tool", "name": "f"}),
    ("tool_choice", "auto"),
    ("thinking", {"type": "much"}),
    ("thinking", {"type": "enabled", "budget_tokens": 0}),
    ("output_config", {"effort": "much"}),
    ("output_format", {"type": "json_schema"}),
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", 1 << 40),
    ("stop_sequences", ["x"] * 100),
    ("stop_sequences", [""]),
    ("stop_sequences", ["x" * 1000]),
    ("temperature", 1.5),
    ("temperature", -0.5),
    ("top_p", 0),
    ("top_k", -2),
    ("service_tier", "batch"),
    ("container", "c"),
    ("mcp_servers", [{"type": "url"}]),
    ("metadata", {"user_id": "x" * 2000}),
    ("frequency", 1),
]


@pytest.mark.parametrize(("name", "value"), _REFUSED_MESSAGES)
def test_a_message_that_cannot_be_made_is_refused_by_the_field(name: str, value: object) -> None:
    outcome = _outcome(read_message, {**_MESSAGE, name: value})

    assert isinstance(outcome, (HttpError, KvtierError))
    assert not isinstance(outcome, HttpError) or outcome.status == 400
    assert name in str(outcome)


_CALLS = ["[]", "not json", "1e999", "{" * 500, '{"a":' * 200 + "1" + "}" * 200, '{"a": 1e400}', f'{{"a": {1 << 80}}}']


@pytest.mark.parametrize("arguments", _CALLS)
def test_arguments_that_a_model_got_wrong_end_no_conversation(arguments: str) -> None:
    call = {"type": "function_call", "name": "f", "arguments": arguments, "call_id": "c"}
    outcome = _outcome(read_response, {**_RESPONSE, "input": [_USER, call]})

    assert isinstance(outcome, GenerationRequest)
    assert outcome.prompts[0].messages[1].tool_calls[0].arguments == {"arguments": arguments}  # type: ignore[union-attr]
