"""Reads tools and tool choices from the bodies of several APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.api.chat.conversation import Tool, ToolChoice
from kvtier.api.chat.inner_json import is_bounded
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_INNER_DEPTH, MAX_INNER_VALUES, MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS
from kvtier.api.neutral_fields import invalid


def read_flat_tool(body: JsonBody, path: str, schema_name: str) -> Tool:
    """Read a tool without an inner `function`, as in Responses and Messages; its schema is under `schema_name`."""
    name = read_tool_name(body, path)
    description = body.text("description")
    parameters = _read_parameters(body, schema_name)
    function: dict[str, object] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    document: dict[str, object] = {"type": "function", "function": function}
    return Tool(name, parameters, document, is_strict=body.flag("strict") is True)


def read_tool_name(body: JsonBody, path: str) -> str:
    name = body.short_text("name", MAX_TOOL_NAME_CHARACTERS)
    if not name or not name.isprintable():
        raise invalid(f"{path}.name", f"{path}.name must be a function's name, in printable characters")
    return name


def _read_parameters(body: JsonBody, name: str) -> dict[str, object] | None:
    schema = body.value(name)
    if schema is None:
        return None
    if not isinstance(schema, dict) or not is_bounded(schema):
        bounds = f"at most {MAX_INNER_DEPTH} levels and {MAX_INNER_VALUES} values"
        raise body.wrong(name, f"a JSON schema, an object of {bounds}")
    return schema


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raises `HttpError` for duplicate names, and for a choice that names no tool."""
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise invalid("tools", "tools must have different names")
    if choice.kind == "required" and not tools:
        raise invalid("tool_choice", "tool_choice asks for a call, but there are no tools")
    others = [name for name in choice.allowed if name not in names]
    if others:
        raise invalid("tool_choice", f"tool_choice allows {shown(others[0])}, which is not one of the tools")
    if choice.kind == "named" and choice.name not in names:
        raise invalid("tool_choice", f"tool_choice names {shown(choice.name)}, which is not one of the tools")


def read_allowed_tools(body: JsonBody, path: str, name_of: Callable[[JsonBody], str | None]) -> ToolChoice:
    """Read an object with a `mode` and the `tools` that may be called; `name_of` reads a tool's type and name.

    Tools without a name are not for the model: they are left out. Raises `HttpError`.
    """
    mode = body.needed_text("mode")
    if mode not in ("auto", "required"):
        raise body.wrong("mode", "auto or required")
    names = []
    for index, given in enumerate(body.items("tools", MAX_TOOLS) or ()):
        place = f"{path}.tools[{index}]"
        if not isinstance(given, dict):
            raise invalid(place, f"{place} must be an object, not {shown(given)}")
        inner = JsonBody(given, f"{place}.")
        name = name_of(inner)
        if name is not None:
            names.append(name)
            inner.refuse_rest()
    if not names:
        raise body.wrong("tools", "a list of at least one tool that the model can call")
    body.refuse_rest()
    return ToolChoice("required" if mode == "required" else "auto", allowed=tuple(dict.fromkeys(names)))
