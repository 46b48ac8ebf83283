"""Translates input items to messages of a conversation, and blocks of an answer to output items.

Items that clients send back have fields without meaning for a model (ids, states, annotations): these are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.api.chat.answer_blocks import AnswerBlock
from kvtier.api.chat.inner_json import read_arguments
from kvtier.api.chat.sealed_thoughts import sealed, unsealed
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_PARTS
from kvtier.api.neutral_fields import image_refused, invalid
from kvtier.api.responses.call_items import CALL_ITEMS, CallItem, read_id
from kvtier.api.responses.client_tools import shell_output
from kvtier.api.responses.record import ResponseRecord
from kvtier.engine.process.messages import ChatMessage, ToolCall

REFERENCE = "reference"
"""The role of a placeholder for an item of an earlier response; its content is the item's id, to be looked up."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PREFIXES = {"text": "msg", "reasoning": "rs"}

_OF_SERVERS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "tool_search_output"),
)
"""Tools that other servers ran in an earlier answer are left out of the history, as their tools are left out."""

_Reader = Callable[[JsonBody, str], ChatMessage | None]


# --- input ------------------------------------------------------------------------------------------------------------


def read_item(item: object, path: str) -> ChatMessage | None:
    """An input item as a message or a part of one; None for an item without content for the model."""
    if not isinstance(item, dict):
        raise invalid(path, f"{path} must be an object, not {shown(item)}")
    body = JsonBody(item, f"{path}.")
    kind = body.text("type") or ("message" if "role" in item else "item_reference")
    if kind in _OF_SERVERS:
        return None
    reader = _READERS.get(kind)
    if reader is None:
        raise HttpError(400, f"{path} is of type {shown(kind)}, which is not supported here", "invalid_value", path)
    return reader(body, path)


def _read_message(body: JsonBody, path: str) -> ChatMessage:
    role = _ROLES.get(body.needed_text("role"))
    if role is None:
        raise body.wrong("role", f"one of {', '.join(_ROLES)}")
    return ChatMessage(role, _text(body, "content", path))


def _reader_of_calls(item: CallItem) -> _Reader:
    def read(body: JsonBody, path: str) -> ChatMessage:
        call, num_characters = item.read(body)
        return ChatMessage("assistant", "", tool_calls=[call], num_more_characters=num_characters)

    return read


def _read_call_output(body: JsonBody, path: str) -> ChatMessage:
    return ChatMessage("tool", _text(body, "output", path), call_id=read_id(body, "call_id"))


def _read_local_shell_output(body: JsonBody, path: str) -> ChatMessage:
    """In the API's reference the id of the call is under `id`; clients also send it as other outputs have it."""
    field = "call_id" if body.has("call_id") else "id"
    return ChatMessage("tool", _text(body, "output", path), call_id=read_id(body, field))


def _read_shell_output(body: JsonBody, path: str) -> ChatMessage:
    return ChatMessage("tool", shell_output(body, path, MAX_PARTS), call_id=read_id(body, "call_id"))


def _read_patch_output(body: JsonBody, path: str) -> ChatMessage:
    text = body.text("output") or body.needed_text("status")
    return ChatMessage("tool", text, call_id=read_id(body, "call_id"))


def _read_reasoning(body: JsonBody, path: str) -> ChatMessage | None:
    parts = body.items("content", MAX_PARTS) or []
    text = "".join(_part_text(part, f"{path}.content[{index}]", _REASONING) for index, part in enumerate(parts))
    text = text or unsealed(body.text("encrypted_content") or "")
    return ChatMessage("assistant", "", reasoning=text) if text else None


_REASONING = {"reasoning_text": "text"}


def _read_reference(body: JsonBody, path: str) -> ChatMessage:
    return ChatMessage(REFERENCE, read_id(body, "id"))


_READERS: Mapping[str, _Reader] = {
    "message": _read_message,
    **{item.item_type: _reader_of_calls(item) for item in CALL_ITEMS.values()},
    "function_call_output": _read_call_output,
    "custom_tool_call_output": _read_call_output,
    "local_shell_call_output": _read_local_shell_output,
    "shell_call_output": _read_shell_output,
    "apply_patch_call_output": _read_patch_output,
    "reasoning": _read_reasoning,
    "item_reference": _read_reference,
}


def _text(body: JsonBody, name: str, path: str) -> str:
    content = body.value(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise body.wrong(name, "text, or a list of text parts")
    body.items(name, MAX_PARTS)
    parts = enumerate(content)
    return "".join(_part_text(part, f"{path}.{name}[{index}]", _TEXT_PARTS) for index, part in parts)


def _part_text(part: object, path: str, kinds: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    name = kinds.get(kind) if isinstance(kind, str) else None
    if kind == "input_image":
        raise image_refused(path)
    if name is None:
        expected = " or ".join(kinds)
        raise invalid(path, f"{path} must be a part of type {expected}, not {shown(part)}: no other type is supported")
    assert isinstance(part, dict)
    return JsonBody(part, f"{path}.").needed_text(name)


# --- output -----------------------------------------------------------------------------------------------------------


def item_id(response_id: str, block: AnswerBlock) -> str:
    prefix = CALL_ITEMS[block.tool_kind].id_prefix if block.kind == "call" else _PREFIXES[block.kind]
    return f"{prefix}_{response_id.partition('_')[2]}_{block.index}"


def response_of_item(item: str) -> str:
    """The id of the response that an item with this id would belong to."""
    return f"resp_{item.partition('_')[2].rpartition('_')[0]}"


def output_item(
    response_id: str, block: AnswerBlock, status: str, record: ResponseRecord, logprobs: object = ()
) -> dict[str, object]:
    """`status` is "in_progress", "completed" or "incomplete"; an item in progress has no content yet."""
    own_id = item_id(response_id, block)
    is_begun = status != "in_progress"
    text = block.text if is_begun else ""
    if block.kind == "call":
        assert block.call is not None
        item = CALL_ITEMS[block.tool_kind]
        fields = {**item.shown(block.call, text), **own_names(block.call.name, record)}
        return {"id": own_id, "type": item.item_type, "status": item.status(status), **fields}
    if block.kind == "reasoning":
        content = [reasoning_part(text)] if is_begun else []
        carried = {"encrypted_content": sealed(text) if is_begun else ""} if record.seals_reasoning else {}
        return {"id": own_id, "type": "reasoning", "status": status, "summary": [], "content": content, **carried}
    content = [text_part(text, logprobs)] if is_begun else []
    return {"id": own_id, "type": "message", "status": status, "role": "assistant", "content": content}


def own_names(name: str, record: ResponseRecord) -> dict[str, object]:
    """The fields of a call of a tool in a namespace."""
    namespace, own = record.namespaces.get(name, ("", ""))
    return {"name": own, "namespace": namespace} if namespace else {}


def text_part(text: str, logprobs: object = ()) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_part(text: str) -> dict[str, object]:
    return {"type": "reasoning_text", "text": text}


def message_part(block: AnswerBlock) -> ChatMessage:
    """A block of an answer as a part of a message in the next turn's prompt."""
    if block.kind == "call":
        assert block.call is not None
        arguments, num_characters = read_arguments(block.text)
        call = ToolCall(block.call.name, arguments, block.call.call_id)
        return ChatMessage("assistant", "", tool_calls=[call], num_more_characters=num_characters)
    if block.kind == "reasoning":
        return ChatMessage("assistant", "", reasoning=block.text)
    return ChatMessage("assistant", block.text)
