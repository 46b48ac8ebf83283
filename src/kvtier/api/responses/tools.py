"""Reads the tools of a body of the Responses API, and the choice among them.

Tools that the client runs are functions for the model, whatever their type. Tools that OpenAI's servers run are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvtier.api.chat.conversation import ToolChoice
from kvtier.api.chat.custom_tool import read_custom_tool
from kvtier.api.chat.tool import CUSTOM, FUNCTION, Tool
from kvtier.api.chat.tool_reading import read_allowed_tools, read_flat_tool, read_tool_name
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS
from kvtier.api.neutral_fields import Neutral, invalid, refuse_others
from kvtier.api.responses.call_items import joined_name
from kvtier.api.responses.client_tools import CLIENT_TOOLS, read_client_tool

_RUN_BY_SERVERS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "image_generation", "mcp", "programmatic_tool_calling"),
)
"""The model does not hear of them: some agents always offer them."""

_SEARCH = "tool_search"
_NAMESPACE = "namespace"
_OF_IMAGES = ("computer", "computer_use_preview")
_NEUTRAL: Neutral = {"namespace": (), "output_schema": (), "async": (False,)}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that the client runs, and what the response shows of them.

    `namespaces` has, by a tool's name in the prompt, its namespace and its own name.
    """

    tools: list[Tool] = field(default_factory=list)
    shown: list[Mapping[str, object]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)


def read_tools(body: JsonBody) -> OfferedTools:
    """Raises `HttpError`."""
    found = OfferedTools()
    for index, given in enumerate(body.items("tools", MAX_TOOLS) or []):
        path = f"tools[{index}]"
        document = _object(given, path)
        if document.get("type") == _NAMESPACE:
            _read_namespace(JsonBody(document, f"{path}."), path, found)
            found.shown.append(document)
        elif (tool := _tool(document, path)) is not None:
            found.tools.append(tool)
            found.shown.append(_shown(tool))
    if len(found.tools) > MAX_TOOLS:
        raise invalid("tools", f"tools must not be more than {MAX_TOOLS}, but is {len(found.tools)}")
    return found


def _object(given: object, path: str) -> dict[str, object]:
    if not isinstance(given, dict):
        raise invalid(path, f"{path} must be an object, not {shown(given)}")
    return given


def _shown(tool: Tool) -> Mapping[str, object]:
    """The tool as the response repeats it."""
    if tool.given is not None:
        return tool.given
    function = tool.document["function"]
    assert isinstance(function, dict)
    return {"type": FUNCTION, "description": None, "parameters": None, **function, "strict": tool.is_strict}


def _read_namespace(body: JsonBody, path: str, found: OfferedTools) -> None:
    """Add the tools of a namespace, as agents offer those of a server of MCP: each with both names in one.

    The first one also has the description of the namespace.
    """
    body.value("type")
    namespace = read_tool_name(body, path)
    about = body.text("description") or ""
    for index, given in enumerate(body.items("tools", MAX_TOOLS) or []):
        place = f"{path}.tools[{index}]"
        document = _object(given, place)
        tool = _tool(document, place) if document.get("type") in (FUNCTION, CUSTOM) else None
        if tool is None:
            raise JsonBody(document, f"{place}.").wrong("type", f"{FUNCTION} or {CUSTOM}")
        name = joined_name(namespace, tool.name)
        if len(name) > MAX_TOOL_NAME_CHARACTERS:
            raise body.too_long("name", MAX_TOOL_NAME_CHARACTERS - len(name) + len(namespace), len(namespace))
        found.tools.append(replace(tool, name=name, document=_renamed(tool, name, about)))
        found.namespaces[name] = (namespace, tool.name)
        about = ""
    body.refuse_rest()


def _renamed(tool: Tool, name: str, about: str) -> dict[str, object]:
    function = tool.document["function"]
    assert isinstance(function, dict)
    description = "\n\n".join(one for one in (about, function.get("description")) if one)
    described = {"name": name, "description": description} if description else {"name": name}
    return {"type": FUNCTION, "function": {**described, **{k: v for k, v in function.items() if k not in described}}}


def _tool(given: Mapping[str, object], path: str) -> Tool | None:
    body = JsonBody(given, f"{path}.")
    kind = body.needed_text("type")
    if kind in _RUN_BY_SERVERS or (kind == _SEARCH and body.text("execution") != "client"):
        return None
    if kind in CLIENT_TOOLS:
        return read_client_tool(kind, body, given)
    if kind in _OF_IMAGES:
        raise body.refuse("type", f"is {shown(kind)}: its results are images, and models here read text only")
    if kind == CUSTOM:
        found = read_custom_tool(body, path, given, lambda form: form)
    elif kind == FUNCTION:
        found = read_flat_tool(body, path, "parameters")
    else:
        raise body.refuse("type", f"is {shown(kind)}: tools of this type are not supported here")
    refuse_others(body, _NEUTRAL)
    body.flag("defer_loading")  # there is no search for tools here: all of them are in the prompt
    body.value("allowed_callers")
    body.refuse_rest()
    return found


def read_tool_choice(body: JsonBody) -> ToolChoice:
    given = body.value("tool_choice")
    if given is None or given == "auto":
        return ToolChoice()
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        return ToolChoice("required")
    choice = body.inner("tool_choice") if isinstance(given, dict) else None
    if choice is not None and choice.value("type") == "allowed_tools":
        return read_allowed_tools(choice, "tool_choice", _name_in_choice)
    name = None if choice is None else _named(choice)
    if name is not None:
        return ToolChoice("named", name)
    raise body.wrong("tool_choice", 'none, auto, required, {"type": "function", "name": NAME}, or allowed_tools')


def _name_in_choice(choice: JsonBody) -> str | None:
    kind = choice.needed_text("type")
    name = _named(choice)
    if name is None and kind not in _RUN_BY_SERVERS:
        raise choice.wrong("type", f"one of {', '.join((FUNCTION, CUSTOM, *CLIENT_TOOLS))}")
    return name


def _named(choice: JsonBody) -> str | None:
    """The name of the tool that this object stands for; None for types that the model cannot call."""
    kind = choice.value("type")
    if kind in (FUNCTION, CUSTOM):
        return choice.needed_text("name")
    return kind if isinstance(kind, str) and kind in CLIENT_TOOLS else None
