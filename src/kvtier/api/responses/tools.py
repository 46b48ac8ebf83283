"""Reads the tools of a body of the Responses API, and the choice among them.

Tools that the client runs are functions for the model, whatever their type. Tools that OpenAI's servers run are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.api.chat.conversation import ToolChoice
from kvtier.api.chat.custom_tool import read_custom_tool
from kvtier.api.chat.tool import CUSTOM, FUNCTION, Tool
from kvtier.api.chat.tool_reading import read_allowed_tools, read_flat_tool
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_TOOLS
from kvtier.api.neutral_fields import Neutral, invalid, refuse_others
from kvtier.api.responses.client_tools import CLIENT_TOOLS, read_client_tool

_RUN_BY_SERVERS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "image_generation", "mcp", "programmatic_tool_calling"),
)
"""The model does not hear of them: some agents always offer them."""

_SEARCH = "tool_search"
_OF_IMAGES = ("computer", "computer_use_preview")
_NEUTRAL: Neutral = {"namespace": (), "output_schema": (), "async": (False,)}


def read_tools(body: JsonBody) -> list[Tool]:
    """Those that the client runs. Raises `HttpError`."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.items("tools", MAX_TOOLS) or [])]
    return [tool for tool in tools if tool is not None]


def shown_tool(tool: Tool) -> Mapping[str, object]:
    """The tool as the response repeats it."""
    if tool.given is not None:
        return tool.given
    function = tool.document["function"]
    assert isinstance(function, dict)
    return {"type": FUNCTION, "description": None, "parameters": None, **function, "strict": tool.is_strict}


def _tool(tool: object, path: str) -> Tool | None:
    if not isinstance(tool, dict):
        raise invalid(path, f"{path} must be an object, not {shown(tool)}")
    body = JsonBody(tool, f"{path}.")
    kind = body.needed_text("type")
    if kind in _RUN_BY_SERVERS or (kind == _SEARCH and body.text("execution") != "client"):
        return None
    if kind in CLIENT_TOOLS:
        return read_client_tool(kind, body, tool)
    if kind in _OF_IMAGES:
        raise body.refuse("type", f"is {shown(kind)}: its results are images, and models here read text only")
    if kind == CUSTOM:
        found = read_custom_tool(body, path, tool, lambda form: form)
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
