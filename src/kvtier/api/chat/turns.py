"""Joins the items or blocks of some APIs into messages of a conversation, one for each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvtier.engine.process.messages import ChatMessage, ToolCall

_REASONING, _TEXT, _CALLS = range(3)


def joined_turns(fragments: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join an answer's reasoning, text and calls, in this order, into the one message that it was."""
    joined: list[ChatMessage] = []
    for fragment in fragments:
        if joined and _continues(joined[-1], fragment):
            joined[-1] = _joined(joined[-1], fragment)
        else:
            joined.append(fragment)
    return joined


def named_results(messages: Sequence[ChatMessage], known: Mapping[str, str] | None = None) -> list[ChatMessage]:
    """Add the tools' names to their results, if the calls are among these messages or in `known` (names by call id)."""
    names = dict(known or {})
    named = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        if message.role == "tool" and not message.name and message.call_id in names:
            message = msgspec.structs.replace(message, name=names[message.call_id])
        named.append(message)
    return named


def paired_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Add ids to calls and results without them.

    A result belongs to a call of the last message with calls: the first of its tool that has no result, else the first.
    """
    paired: list[ChatMessage] = []
    num_calls = 0
    waiting: list[ToolCall] = []
    for message in messages:
        if message.tool_calls:
            ids = (call.call_id or f"call_{num_calls + number}" for number, call in enumerate(message.tool_calls))
            calls = [
                msgspec.structs.replace(call, call_id=call_id)
                for call, call_id in zip(message.tool_calls, ids, strict=True)
            ]
            num_calls, waiting = num_calls + len(calls), list(calls)
            message = msgspec.structs.replace(message, tool_calls=calls)
        elif message.role == "tool" and not message.call_id and waiting:
            found = next((call for call in waiting if call.name == message.name), waiting[0])
            waiting.remove(found)
            message = msgspec.structs.replace(message, call_id=found.call_id)
        paired.append(message)
    return paired


def _continues(before: ChatMessage, fragment: ChatMessage) -> bool:
    if before.role != "assistant" or fragment.role != "assistant":
        return False
    last, first = _last_kind(before), _first_kind(fragment)
    return last < first or (last == first != _TEXT)


def _first_kind(message: ChatMessage) -> int:
    if message.reasoning is not None:
        return _REASONING
    return _CALLS if message.tool_calls and not message.content else _TEXT


def _last_kind(message: ChatMessage) -> int:
    if message.tool_calls:
        return _CALLS
    return _REASONING if message.reasoning is not None and not message.content else _TEXT


def _joined(before: ChatMessage, fragment: ChatMessage) -> ChatMessage:
    reasoning = before.reasoning
    if fragment.reasoning is not None:
        reasoning = (reasoning or "") + fragment.reasoning
    return msgspec.structs.replace(
        before,
        content=before.content + fragment.content,
        reasoning=reasoning,
        tool_calls=[*before.tool_calls, *fragment.tool_calls],
        num_more_characters=before.num_more_characters + fragment.num_more_characters,
    )
