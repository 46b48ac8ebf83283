"""Tools of Anthropic's own that the client runs (bash, text editor, memory), with the arguments that models know."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_reading import read_tool_name
from kvtier.api.json_body import JsonBody

_TYPE = re.compile(r"(bash|text_editor|memory)_([0-9]{8})")
_LAST_WITH_UNDO = "20250124"
_FIRST_WITH_INSERT_TEXT = "20250728"

_TEXT: Mapping[str, object] = {"type": "string"}
_LINE: Mapping[str, object] = {"type": "integer"}
_LINES: Mapping[str, object] = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: the first and the last line to show, counted from 1; -1 as the last is the end.",
}
_PATH: Mapping[str, object] = {"type": "string", "description": "The absolute path of a file or folder."}
_MEMORY_PATH: Mapping[str, object] = {"type": "string", "description": "A file or folder under /memories."}


def is_client_tool(kind: str) -> bool:
    return _TYPE.fullmatch(kind) is not None


def read_client_tool(kind: str, body: JsonBody, path: str) -> Tool:
    """Read a tool of such a type: its name, and what its type says of it. Raises `HttpError`."""
    found = _TYPE.fullmatch(kind)
    assert found is not None
    family, version = found.groups()
    if family == "text_editor":
        body.whole("max_characters")  # the client cuts what it shows
    description, properties, required = _described(family, version)
    schema: dict[str, object] = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    name = read_tool_name(body, path)
    function = {"name": name, "description": description, "parameters": schema}
    return Tool(name, schema, {"type": "function", "function": function}, is_strict=body.flag("strict") is True)


def _described(family: str, version: str) -> tuple[str, dict[str, object], list[str]]:
    """The description of a tool, its parameters, and those that are required."""
    if family == "bash":
        return _BASH, {"command": _TEXT, "restart": {"type": "boolean"}}, []
    if family == "memory":
        return _MEMORY, _memory_parameters(), ["command"]
    return _EDITOR, _editor_parameters(version), ["command", "path"]


_BASH = (
    "Runs a command in a bash session that lasts, and returns what it prints. Each call has a command, or "
    "restart: true, which begins a new session."
)
_EDITOR = (
    "Shows and edits text files. view shows a file or lists a folder; create writes file_text to a new file; "
    "str_replace replaces old_str, which must occur exactly once, by new_str; insert adds text after line insert_line "
    "(0: at the beginning)."
)
_MEMORY = (
    "Keeps notes in files that outlast this conversation. view shows a file or lists a folder; create writes "
    "file_text; str_replace replaces old_str by new_str; insert adds insert_text after line insert_line; delete "
    "removes path; rename moves old_path to new_path. Look at /memories before you begin."
)


def _editor_parameters(version: str) -> dict[str, object]:
    undo = ["undo_edit"] if version <= _LAST_WITH_UNDO else []
    has_insert_text = version >= _FIRST_WITH_INSERT_TEXT
    replacing = "For str_replace." if has_insert_text else "For str_replace and insert."
    parameters: dict[str, object] = {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", *undo]},
        "path": _PATH,
        "file_text": {**_TEXT, "description": "For create."},
        "old_str": {**_TEXT, "description": "For str_replace."},
        "new_str": {**_TEXT, "description": replacing},
        "insert_line": {**_LINE, "description": "For insert."},
        "view_range": _LINES,
    }
    return parameters | ({"insert_text": {**_TEXT, "description": "For insert."}} if has_insert_text else {})


def _memory_parameters() -> dict[str, object]:
    return {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
        "path": _MEMORY_PATH,
        "view_range": _LINES,
        "file_text": _TEXT,
        "old_str": _TEXT,
        "new_str": _TEXT,
        "insert_line": _LINE,
        "insert_text": _TEXT,
        "old_path": _MEMORY_PATH,
        "new_path": _MEMORY_PATH,
    }
