"""JSON of the client's own inside a body, checked against bounds: schemas of tools, arguments of calls."""

from __future__ import annotations

import msgspec

from kvtier.api.chat.input_text import INPUT
from kvtier.api.chat.tool import Tool
from kvtier.api.json_body import JsonBody, decode_inner
from kvtier.api.limits import MAX_INNER_DEPTH, MAX_INNER_VALUES, MAX_TOOL_NAME_CHARACTERS
from kvtier.engine.process.messages import ToolCall

_LOW, _HIGH = -(1 << 63), (1 << 64) - 1
_UNREADABLE = "arguments"
"""The field name under which a chat template sees arguments that are not a JSON object."""

_NOT_FOR_TEMPLATES = "cache_control"
"""Clients move this field from turn to turn: in a template's output it would change the prompt's beginning."""


def is_bounded(value: object) -> bool:
    """Whether JSON is within the bounds of depth and size, and a message to an engine can carry its numbers."""
    left: list[tuple[object, int]] = [(value, 0)]
    num_values = 0
    while left:
        one, depth = left.pop()
        num_values += 1
        if isinstance(one, (dict, list)):
            if depth >= MAX_INNER_DEPTH or num_values + len(left) + len(one) > MAX_INNER_VALUES:
                return False
            left += [(inner, depth + 1) for inner in (one.values() if isinstance(one, dict) else one)]
        elif isinstance(one, int) and not _LOW <= one <= _HIGH:
            return False
    return True


def read_arguments(given: object) -> tuple[dict[str, object], int]:
    """The arguments of a call in a conversation, given as text or as an object, and their length in characters.

    A model may have written anything: arguments that are not an object are wrapped in one.
    """
    if isinstance(given, dict) and is_bounded(given):
        return given, len(msgspec.json.encode(given))
    text = given if isinstance(given, str) else ""
    try:
        found = decode_inner(text or "{}")
    except ValueError:
        found = None
    if isinstance(found, dict) and is_bounded(found):
        return found, len(text)
    return {_UNREADABLE: text}, len(text)


def read_wrapped_tool(body: JsonBody, document: dict[str, object]) -> Tool:
    """Read a tool with its fields inside `function`, as in OpenAI's chat API and Ollama's. Raises `HttpError`."""
    if not is_bounded(document):
        raise body.wrong("function", f"JSON of at most {MAX_INNER_DEPTH} levels and {MAX_INNER_VALUES} values")
    kind = body.text("type") or "function"
    function = body.inner("function")
    if kind != "function" or function is None:
        raise body.wrong("type", "function, with a field of that name beside it")
    name = function.needed_text("name")
    if not 0 < len(name) <= MAX_TOOL_NAME_CHARACTERS or not name.isprintable():
        raise function.wrong("name", f"printable text of at most {MAX_TOOL_NAME_CHARACTERS} characters")
    parameters = function.value("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise function.wrong("parameters", "a JSON schema, which is an object")
    shown = {key: value for key, value in document.items() if key != _NOT_FOR_TEMPLATES}
    return Tool(name, parameters, shown, is_strict=function.flag("strict") is True)


def read_call(call: JsonBody) -> tuple[ToolCall, int]:
    """Read a call of an earlier answer, and the length of its arguments in characters. Raises `HttpError`."""
    function, custom = call.inner("function"), call.inner("custom")
    if function is None and custom is not None:
        text = custom.needed_text(INPUT)
        return ToolCall(custom.needed_text("name"), {INPUT: text}, call.text("id") or ""), len(text)
    if function is None:
        raise call.wrong("function", "an object with name and arguments")
    arguments, num_characters = read_arguments(function.value("arguments"))
    return ToolCall(function.needed_text("name"), arguments, call.text("id") or ""), num_characters
