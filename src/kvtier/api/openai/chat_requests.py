"""Reads conversations from bodies of OpenAI's chat API: messages, tools, and the reasoning effort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kvtier.api.chat.conversation import Conversation, Tool, ToolChoice
from kvtier.api.chat.custom_tool import read_custom_tool
from kvtier.api.chat.effort import EFFORTS, THINKS
from kvtier.api.chat.inner_json import read_call, read_wrapped_tool
from kvtier.api.chat.tool import CUSTOM, FUNCTION
from kvtier.api.chat.tool_reading import check_tools, read_allowed_tools
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_CHARACTERS,
    MAX_TEMPLATE_DEPTH,
    MAX_TEMPLATE_VALUES,
    MAX_TOOLS,
)
from kvtier.api.neutral_fields import Neutral, image_refused, invalid, refuse_others
from kvtier.api.request_rules import read_verbosity
from kvtier.api.retention_fields import read_cache_control
from kvtier.engine.grammar import Grammar
from kvtier.engine.process.messages import ChatMessage, ToolCall

Marked: TypeAlias = list[tuple[float, int | None]]
"""Retention marks: seconds to keep, and the number of messages that the mark covers."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_IGNORED = (
    *("annotations", "cache_control", "id", "metadata", "parsed", "prompt_cache_breakpoint"),
    *("provider_specific_fields", "reasoning_details"),
)
"""Fields that clients send back from an answer, or send for other servers; no chat template reads them."""

_NEUTRAL_IN_MESSAGES: Neutral = {"audio": (), "function_call": (), "refusal": ("",)}
_SWITCHES: Mapping[str, bool | None] = {"enabled": True, "disabled": False, "auto": None}
_CHOICES = ("auto", "none", "required")


def read_conversation(body: JsonBody, output: Grammar | None = None, marked: Marked | None = None) -> Conversation:
    """`output` constrains the text of the answer; the retention marks of `cache_control` are added to `marked`.

    Raises an `HttpError` that names the field.
    """
    marked = [] if marked is None else marked
    tools = _tools(body, marked)
    effort = body.text("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise body.wrong("reasoning_effort", f"one of {', '.join(EFFORTS)}")
    thinks = _thinks(body)
    return Conversation(
        messages=_messages(body, marked),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        allows_several_calls=body.flag("parallel_tool_calls") is not False,
        output=output,
        thinks=THINKS.get(effort) if thinks is None else thinks,
        effort=None if effort == "none" else effort,
        template_values={**read_verbosity(body), **_template_values(body)},
        shows_reasoning=body.flag("include_reasoning") is not False,
    )


def _thinks(body: JsonBody) -> bool | None:
    """Whether the model thinks, in the words of other servers: `enable_thinking`, or `thinking` with a type.

    They have no effect on a model whose template has no switch. None without either.
    """
    switch = body.flag("enable_thinking")
    thinking = body.inner("thinking")
    if thinking is None:
        return switch
    kind = thinking.needed_text("type")
    if kind not in _SWITCHES:
        raise thinking.wrong("type", f"one of {', '.join(_SWITCHES)}")
    thinking.flag("clear_thinking")  # the template decides which thoughts of earlier turns it shows
    thinking.refuse_rest()
    return _SWITCHES[kind] if switch is None else switch


# --- messages ---------------------------------------------------------------------------------------------------------


def _messages(body: JsonBody, marked: Marked) -> list[ChatMessage]:
    messages = body.items("messages", MAX_MESSAGES)
    if not messages:
        raise body.wrong("messages", "a list of at least one message")
    found: list[ChatMessage] = []
    names: dict[str, str] = {}
    """Tool names by call id."""
    for index, message in enumerate(messages):
        read = _message(message, f"messages[{index}]", names)
        _note_marks(message, index, marked)
        names |= {call.call_id: call.name for call in read.tool_calls}
        found.append(read)
    return found


def _message(message: object, path: str, names: dict[str, str]) -> ChatMessage:
    if not isinstance(message, dict):
        raise invalid(path, f"{path} must be an object, not {shown(message)}")
    body = JsonBody(message, f"{path}.")
    role = _ROLES.get(body.needed_text("role"))
    if role is None:
        raise body.wrong("role", f"one of {', '.join(_ROLES)}")
    calls, num_characters = _calls(body, path)
    content = _content(body, path, is_optional=role in ("assistant", "tool"))
    name, call_id = body.text("name"), body.text("tool_call_id")
    reasoning = _reasoning(body)
    refuse_others(body, _NEUTRAL_IN_MESSAGES)
    if role != "assistant":  # an answer of another server may have any fields
        _refuse_rest(body, message)
    if role == "assistant":
        return ChatMessage(role, content, name, reasoning, calls, None, num_characters)
    if calls:
        raise invalid(f"{path}.tool_calls", f"{path}.tool_calls is allowed in assistant messages only")
    if role == "tool":
        return ChatMessage(role, content, name or names.get(call_id or ""), call_id=call_id)
    return ChatMessage(role, content, name)


def _note_marks(message: object, index: int, marked: Marked) -> None:
    """Add the retention marks of a message that has been read, and of its parts."""
    assert isinstance(message, dict)
    path, parts = f"messages[{index}].", message.get("content")
    bodies = [JsonBody(message, path)]
    if isinstance(parts, list):
        bodies += [JsonBody(part, f"{path}content[{number}].") for number, part in enumerate(parts)]
    found = [ttl_s for body in bodies if (ttl_s := read_cache_control(body)) is not None]
    marked += [(ttl_s, index + 1) for ttl_s in found]


def _refuse_rest(body: JsonBody, document: Mapping[str, object]) -> None:
    """Raises an `HttpError` for an unknown field, except if its value is empty or false: that asks for nothing."""
    for name, value in document.items():
        if name in _IGNORED or not value:
            body.value(name)
    body.refuse_rest()


def _reasoning(body: JsonBody) -> str | None:
    """The first reasoning field with text: clients send an answer's reasoning back under several names."""
    blocks = body.items("thinking_blocks", MAX_PARTS) or ()
    thoughts = [one.get("thinking") for one in blocks if isinstance(one, dict)]
    found = [body.text(field) for field in _REASONING]
    found.append("".join(one for one in thoughts if isinstance(one, str)))
    return next((one for one in found if one), None)


def _content(body: JsonBody, path: str, *, is_optional: bool) -> str:
    content = body.value("content")
    if content is None and is_optional:
        return ""
    if isinstance(content, list):
        body.items("content", MAX_PARTS)
        return "".join(_text_of_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise body.wrong("content", "text, or a list of text parts")
    return content


def _text_of_part(part: object, path: str) -> str:
    if isinstance(part, dict) and part.get("type") == "image_url":
        raise image_refused(path)
    if not isinstance(part, dict) or part.get("type") != "text":
        raise invalid(path, f"{path} must be a part of type text, not {shown(part)}: no other type is supported")
    body = JsonBody(part, f"{path}.")
    body.value("type")
    text = body.needed_text("text")
    _refuse_rest(body, part)
    return text


def _calls(body: JsonBody, path: str) -> tuple[list[ToolCall], int]:
    calls, num_characters = [], 0
    for index, given in enumerate(body.items("tool_calls", MAX_CALLS) or ()):
        place = f"{path}.tool_calls[{index}]"
        if not isinstance(given, dict):
            raise invalid(place, f"{place} must be an object, not {shown(given)}")
        call, count = read_call(JsonBody(given, f"{place}."))
        calls.append(call)
        num_characters += count + len(call.name) + len(call.call_id)
    return calls, num_characters


# --- tools ------------------------------------------------------------------------------------------------------------


def _tools(body: JsonBody, marked: Marked) -> list[Tool]:
    tools: list[Tool] = []
    for index, given in enumerate(body.items("tools", MAX_TOOLS) or ()):
        if not isinstance(given, dict):
            raise invalid(f"tools[{index}]", f"tools[{index}] must be an object, not {shown(given)}")
        tools.append(_tool(JsonBody(given, f"tools[{index}]."), given, f"tools[{index}]"))
        ttl_s = read_cache_control(JsonBody(given, f"tools[{index}]."))
        if ttl_s is not None:
            marked.append((ttl_s, 1))
    return tools


def _tool(body: JsonBody, given: dict[str, object], path: str) -> Tool:
    custom = body.inner(CUSTOM) if body.value("type") == CUSTOM else None
    if custom is None:
        return read_wrapped_tool(body, given)
    tool = read_custom_tool(custom, f"{path}.{CUSTOM}", given, _grammar_inside)
    custom.refuse_rest()
    return tool


def _grammar_inside(form: JsonBody) -> JsonBody:
    found = form.inner("grammar")
    if found is None:
        raise form.missing("grammar")
    return found


def _tool_choice(body: JsonBody, tools: Sequence[Tool]) -> ToolChoice:
    choice = _named(body) if isinstance(body.value("tool_choice"), dict) else _plain(body)
    check_tools(tools, choice)
    return choice


def _plain(body: JsonBody) -> ToolChoice:
    given = body.value("tool_choice")
    for kind in ("auto", "none", "required"):
        if given == kind or (given is None and kind == "auto"):
            return ToolChoice(kind)
    raise body.wrong("tool_choice", f"one of {', '.join(_CHOICES)}, or an object that names a function")


def _named(body: JsonBody) -> ToolChoice:
    choice = body.inner("tool_choice")
    assert choice is not None
    allowed = choice.inner("allowed_tools")
    if choice.text("type") == "allowed_tools" and allowed is not None:
        return read_allowed_tools(allowed, "tool_choice.allowed_tools", _wrapped_name)
    named = _named_inside(choice)
    if named is None:
        raise choice.wrong("type", "function, custom or allowed_tools, with a field of that name beside it")
    return ToolChoice("named", named.needed_text("name"))


def _wrapped_name(tool: JsonBody) -> str:
    named = _named_inside(tool)
    if named is None:
        raise tool.wrong("type", "function or custom, with a field of that name beside it")
    return named.needed_text("name")


def _named_inside(body: JsonBody) -> JsonBody | None:
    """The object that has a tool's name: its field's name is the tool's type."""
    kind = body.text("type")
    return body.inner(kind) if kind in (FUNCTION, CUSTOM) else None


# --- values for the template ------------------------------------------------------------------------------------------


def _template_values(body: JsonBody) -> dict[str, object]:
    values = body.value("chat_template_kwargs")
    if values is None:
        return {}
    if not isinstance(values, dict) or not _is_plain(values):
        expected = f"an object of at most {MAX_TEMPLATE_DEPTH} levels, {MAX_TEMPLATE_VALUES} values"
        raise body.wrong("chat_template_kwargs", f"{expected} and {MAX_TEMPLATE_CHARACTERS} characters")
    return values


def _is_plain(values: object) -> bool:
    """Whether the values are within bounds, and a message to an engine can carry them."""
    left: list[tuple[object, int]] = [(values, 0)]
    num_values = num_characters = 0
    while left:
        value, depth = left.pop()
        num_values += 1
        if isinstance(value, (dict, list)):
            if depth >= MAX_TEMPLATE_DEPTH or len(value) > MAX_TEMPLATE_VALUES:
                return False
            if isinstance(value, dict):
                num_characters += sum(map(len, value))
            left += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return False
        if num_values + len(left) > MAX_TEMPLATE_VALUES + 1 or num_characters > MAX_TEMPLATE_CHARACTERS:
            return False
    return True
