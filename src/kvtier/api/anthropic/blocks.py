"""Translates a body's messages, which are lists of blocks, to messages of a conversation, with their cache marks.

Blocks that clients send back have fields without meaning for a model (signatures, citations): these are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvtier.api.anthropic.documents import TEXT_BLOCKS, text_of
from kvtier.api.chat.inner_json import is_bounded
from kvtier.api.chat.sealed_thoughts import unsealed
from kvtier.api.chat.turns import joined_turns, named_results
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_ID_CHARACTERS, MAX_MESSAGES, MAX_PARTS, MAX_TOOL_NAME_CHARACTERS
from kvtier.api.neutral_fields import image_refused, invalid
from kvtier.api.prompt_form import BILLING
from kvtier.api.retention_fields import needed_parts, read_cache_control
from kvtier.engine.process.messages import ChatMessage, ToolCall
from kvtier.tiers.retention import MAX_ASKS

_USED_BY_SERVERS = ("server_tool_use", "mcp_tool_use")
_RESULT_OF_SERVERS = "_tool_result"
"""Tools that other servers ran in an earlier answer are left out of the history, as their tools are left out."""

_ERROR = "error"
"""The text of a tool result with `is_error` and no text of its own."""


class CacheMark(msgspec.Struct, frozen=True, array_like=True):
    """A `cache_control`: the prompt is to stay cached up to the end of item `number` (an index) in `part`."""

    part: Literal["tools", "system", "messages", "all"]
    number: int
    ttl_s: float


@dataclass(slots=True)
class Marks:
    """The cache marks of a body, in its order."""

    found: list[CacheMark] = field(default_factory=list)
    num_fragments: list[int] = field(default_factory=list)
    """After each message of the body, how many fragments there are so far."""
    fragments: list[ChatMessage] = field(default_factory=list)

    def note(self, body: JsonBody, part: Literal["tools", "system", "messages", "all"], number: int = 0) -> None:
        """Add the `cache_control` of a block, a tool, or the whole body. Raises `HttpError` if it is invalid."""
        ttl_s = read_cache_control(body)
        if ttl_s is not None:
            self.found.append(CacheMark(part, number, ttl_s))

    def parts(self, num_system: int) -> list[tuple[float, int | None]]:
        """The parts for a `RetentionWish`, of a prompt that begins with `num_system` system messages."""
        last = {(mark.part, mark.ttl_s): mark.number for mark in self.found}
        found = sorted(last.items(), key=lambda item: item[0][1], reverse=True)[:MAX_ASKS]
        return needed_parts((ttl_s, self._num_messages(part, number, num_system)) for (part, ttl_s), number in found)

    def _num_messages(self, part: str, number: int, num_system: int) -> int | None:
        """Messages up to the mark. Tools are written before the first message and are kept with it."""
        if part == "all":
            return None
        if part != "messages":
            return max(1, num_system)
        return num_system + len(joined_turns(self.fragments[: self.num_fragments[number]]))


def read_system(body: JsonBody, marks: Marks) -> list[ChatMessage]:
    system = body.value("system")
    if system is None:
        return []
    if isinstance(system, str):
        return [ChatMessage("system", _without_billing(system))]
    texts = []
    for index, block in enumerate(body.items("system", MAX_PARTS) or []):
        inner = _block(block, f"system[{index}]")
        marks.note(inner, "system", index)
        texts.append(_without_billing(text_of(inner, f"system[{index}]")))
    return [ChatMessage("system", "".join(texts))] if texts else []


def _without_billing(text: str) -> str:
    """Leaves out a line that Claude Code puts before its system prompt, for Anthropic's accounts.

    It has a checksum that changes with every request: no prompt would begin like the one before it.
    """
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def read_messages(body: JsonBody, marks: Marks) -> list[ChatMessage]:
    """Raises `HttpError` for the first block that is not supported."""
    given = body.items("messages", MAX_MESSAGES)
    if not given:
        raise body.wrong("messages", "a list of at least one message")
    messages: list[ChatMessage] = []
    for index, message in enumerate(given):
        messages += _read_message(_block(message, f"messages[{index}]"), index, marks)
        marks.num_fragments.append(len(messages))
    marks.fragments = messages
    return named_results(joined_turns(messages))


def _read_message(body: JsonBody, index: int, marks: Marks) -> list[ChatMessage]:
    role = body.needed_text("role")
    if role not in ("user", "assistant", "system"):
        raise body.wrong("role", "user, assistant or system")
    content = body.value("content")
    if isinstance(content, str):
        return [ChatMessage(role, content)]
    blocks = body.items("content", MAX_PARTS)
    if blocks is None:
        raise body.wrong("content", "text, or a list of blocks")
    fragments: list[ChatMessage] = []
    for number, block in enumerate(blocks):
        path = f"messages[{index}].content[{number}]"
        inner = _block(block, path)
        marks.note(inner, "messages", index)
        fragment = _read_block(inner, role, path)
        if fragment is not None:
            _append(fragments, fragment)
    return fragments or [ChatMessage(role, "")]


def _append(fragments: list[ChatMessage], fragment: ChatMessage) -> None:
    """Adjacent text blocks become one text."""
    if fragments and _is_text(fragments[-1]) and _is_text(fragment):
        fragment = msgspec.structs.replace(fragment, content=fragments.pop().content + fragment.content)
    fragments.append(fragment)


def _is_text(message: ChatMessage) -> bool:
    return message.role != "tool" and message.reasoning is None and not message.tool_calls


def _read_block(body: JsonBody, role: str, path: str) -> ChatMessage | None:
    kind = body.needed_text("type")
    if kind in TEXT_BLOCKS:
        return ChatMessage(role, text_of(body, path))
    if role == "assistant" and kind == "thinking":
        thought = body.needed_text("thinking") or unsealed(body.text("signature") or "")
        return ChatMessage(role, "", reasoning=thought) if thought else None
    if role == "assistant" and kind == "redacted_thinking":
        body.needed_text("data")  # encrypted by another server, which alone can read it
        return None
    if role == "assistant" and (kind in _USED_BY_SERVERS or kind.endswith(_RESULT_OF_SERVERS)):
        return None
    if role == "assistant" and kind == "tool_use":
        return _read_call(body, path)
    if role == "user" and kind == "tool_result":
        return _read_result(body, path)
    if kind == "image":
        raise image_refused(path)
    sentence = f"{path} is of type {shown(kind)}, which is not supported in {role} messages"
    raise HttpError(400, sentence, "invalid_value", path)


def _read_call(body: JsonBody, path: str) -> ChatMessage:
    arguments = body.value("input")
    if not isinstance(arguments, dict) or not is_bounded(arguments):
        raise body.wrong("input", "an object that is not too large")
    body.needed_text("name")
    name = body.short_text("name", MAX_TOOL_NAME_CHARACTERS) or ""
    call = ToolCall(name, arguments, _id(body, "id"))
    num_characters = len(msgspec.json.encode(arguments))
    return ChatMessage("assistant", "", tool_calls=[call], num_more_characters=num_characters)


def _read_result(body: JsonBody, path: str) -> ChatMessage:
    content = body.value("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        blocks = enumerate(body.items("content", MAX_PARTS) or [])
        paths = ((block, f"{path}.content[{number}]") for number, block in blocks)
        text = "".join(text_of(_block(block, inner), inner) for block, inner in paths)
    if body.flag("is_error") and not text:
        text = _ERROR
    return ChatMessage("tool", text, call_id=_id(body, "tool_use_id"))


def _block(block: object, path: str) -> JsonBody:
    if not isinstance(block, dict):
        raise invalid(path, f"{path} must be an object, not {shown(block)}")
    return JsonBody(block, f"{path}.")


def _id(body: JsonBody, name: str) -> str:
    body.needed_text(name)
    return body.short_text(name, MAX_ID_CHARACTERS) or ""
