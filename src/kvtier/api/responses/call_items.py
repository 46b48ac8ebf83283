"""Items of calls, by the kind of the called tool: what an answer shows, and what of it goes back into a prompt.

For the model every tool is a function. What it wrote comes back into the next prompt in the same words: a member that
the model left out is left out again, and the others are in the order of their schema.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from kvtier.api.chat.inner_json import is_bounded, read_arguments
from kvtier.api.chat.input_text import INPUT, input_text
from kvtier.api.chat.parts import CallBegin
from kvtier.api.chat.tool import CUSTOM, FUNCTION
from kvtier.api.json_body import JsonBody, decode_inner
from kvtier.api.limits import MAX_CALL_COMMANDS, MAX_ID_CHARACTERS, MAX_TOOL_NAME_CHARACTERS
from kvtier.api.responses.client_tools import APPLY_PATCH, DELETE, LOCAL_SHELL, OPERATIONS, SHELL
from kvtier.engine.process.messages import ToolCall

_INCOMPLETE = "incomplete"
_SEPARATOR = "__"
_MAX_NUMBER = (1 << 31) - 1


class CallItem(ABC):
    """A kind of items. `delta` and `done` are stream events about the text of a call; they are empty without any."""

    tool_kind: ClassVar[str]
    item_type: ClassVar[str]
    id_prefix: ClassVar[str]
    delta: ClassVar[str] = ""
    done: ClassVar[str] = ""

    @abstractmethod
    def shown(self, call: CallBegin, arguments: str) -> dict[str, object]:
        """The item's own fields. The arguments may be cut; they are empty as long as the item is in progress."""

    @abstractmethod
    def read(self, body: JsonBody) -> tuple[ToolCall, int]:
        """A call in the input, and the length of its arguments in characters. Raises `HttpError`."""

    def done_fields(self, call: CallBegin, arguments: str) -> dict[str, object]:
        """The fields of the event `done`."""
        return {}

    def status(self, status: str) -> str:
        return status


class _Function(CallItem):
    tool_kind = FUNCTION
    item_type = "function_call"
    id_prefix = "fc"
    delta = "response.function_call_arguments.delta"
    done = "response.function_call_arguments.done"

    def shown(self, call: CallBegin, arguments: str) -> dict[str, object]:
        return {"call_id": call.call_id, "name": call.name, "arguments": arguments}

    def done_fields(self, call: CallBegin, arguments: str) -> dict[str, object]:
        return {"name": call.name, "arguments": arguments or "{}"}

    def read(self, body: JsonBody) -> tuple[ToolCall, int]:
        arguments, num_characters = read_arguments(body.text("arguments"))
        return ToolCall(_name(body), arguments, read_id(body, "call_id")), num_characters


class _Custom(CallItem):
    tool_kind = CUSTOM
    item_type = "custom_tool_call"
    id_prefix = "ctc"
    delta = "response.custom_tool_call_input.delta"
    done = "response.custom_tool_call_input.done"

    def shown(self, call: CallBegin, arguments: str) -> dict[str, object]:
        return {"call_id": call.call_id, "name": call.name, INPUT: input_text(arguments)}

    def done_fields(self, call: CallBegin, arguments: str) -> dict[str, object]:
        return {INPUT: input_text(arguments)}

    def read(self, body: JsonBody) -> tuple[ToolCall, int]:
        text = body.needed_text(INPUT)
        return ToolCall(_name(body), {INPUT: text}, read_id(body, "call_id")), len(text)


class _LocalShell(CallItem):
    tool_kind = LOCAL_SHELL
    item_type = "local_shell_call"
    id_prefix = "lsh"

    def shown(self, call: CallBegin, arguments: str) -> dict[str, object]:
        given = _decoded(arguments)
        action: dict[str, object] = {
            "type": "exec",
            "command": _texts(given.get("command")),
            "env": {},
            "timeout_ms": _number(given.get("timeout_ms")),
            "user": None,
            "working_directory": _text(given.get("working_directory")),
        }
        return {"call_id": call.call_id, "action": action}

    def read(self, body: JsonBody) -> tuple[ToolCall, int]:
        action = _needed_inner(body, "action")
        members = {
            "command": _checked_texts(action, "command"),
            "working_directory": action.text("working_directory"),
            "timeout_ms": action.whole("timeout_ms"),
        }
        return _call_of(LOCAL_SHELL, members, body)


class _Shell(CallItem):
    tool_kind = SHELL
    item_type = "shell_call"
    id_prefix = "sh"

    def shown(self, call: CallBegin, arguments: str) -> dict[str, object]:
        given = _decoded(arguments)
        action: dict[str, object] = {
            "commands": _texts(given.get("commands")),
            "timeout_ms": _number(given.get("timeout_ms")),
            "max_output_length": _number(given.get("max_output_length")),
        }
        return {"call_id": call.call_id, "action": action, "environment": {"type": "local"}}

    def read(self, body: JsonBody) -> tuple[ToolCall, int]:
        action = _needed_inner(body, "action")
        members = {
            "commands": _checked_texts(action, "commands"),
            "timeout_ms": action.whole("timeout_ms"),
            "max_output_length": action.whole("max_output_length"),
        }
        return _call_of(SHELL, members, body)


class _ApplyPatch(CallItem):
    tool_kind = APPLY_PATCH
    item_type = "apply_patch_call"
    id_prefix = "apc"

    def shown(self, call: CallBegin, arguments: str) -> dict[str, object]:
        given = _decoded(arguments)
        kind = given.get("type")
        operation = {
            "type": kind if kind in OPERATIONS else OPERATIONS[0],
            "path": _text(given.get("path")) or "",
        }
        if operation["type"] != DELETE:
            operation["diff"] = _text(given.get("diff")) or ""
        return {"call_id": call.call_id, "operation": operation}

    def status(self, status: str) -> str:
        """This item knows no incomplete calls. One that is cut stays in progress: it must not be applied."""
        return "in_progress" if status == _INCOMPLETE else status

    def read(self, body: JsonBody) -> tuple[ToolCall, int]:
        operation = _needed_inner(body, "operation")
        kind = operation.needed_text("type")
        if kind not in OPERATIONS:
            raise operation.wrong("type", f"one of {', '.join(OPERATIONS)}")
        members = {"type": kind, "path": operation.needed_text("path"), "diff": operation.text("diff")}
        return _call_of(APPLY_PATCH, members, body)


_ALL = (_Function(), _Custom(), _LocalShell(), _Shell(), _ApplyPatch())
CALL_ITEMS = {item.tool_kind: item for item in _ALL}
"""By the kind of the tool."""


# --- what an answer has -----------------------------------------------------------------------------------------------


def _decoded(arguments: str) -> dict[str, object]:
    """A grammar makes these arguments follow their schema, unless they are cut."""
    try:
        found = decode_inner(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and is_bounded(found) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER else None


# --- what the input has -----------------------------------------------------------------------------------------------


def read_id(body: JsonBody, name: str) -> str:
    body.needed_text(name)
    return body.short_text(name, MAX_ID_CHARACTERS) or ""


def joined_name(namespace: str, name: str) -> str:
    """A tool's name in the prompt: models know it in this form from servers of MCP."""
    return f"{namespace}{name}" if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


def _name(body: JsonBody) -> str:
    body.needed_text("name")
    name = body.short_text("name", MAX_TOOL_NAME_CHARACTERS) or ""
    namespace = body.short_text("namespace", MAX_TOOL_NAME_CHARACTERS)
    return joined_name(namespace, name) if namespace else name


def _needed_inner(body: JsonBody, name: str) -> JsonBody:
    found = body.inner(name)
    if found is None:
        raise body.missing(name)
    return found


def _checked_texts(body: JsonBody, name: str) -> list[str]:
    given = body.items(name, MAX_CALL_COMMANDS) or []
    found = [one for one in given if isinstance(one, str)]
    if len(found) < len(given):
        raise body.wrong(name, "a list of texts")
    return found


def _call_of(name: str, members: Mapping[str, object], body: JsonBody) -> tuple[ToolCall, int]:
    arguments = {key: value for key, value in members.items() if value is not None}
    return ToolCall(name, arguments, read_id(body, "call_id")), sum(map(_num_characters, arguments.values()))


def _num_characters(value: object) -> int:
    return sum(map(len, value)) if isinstance(value, list) else len(str(value))
