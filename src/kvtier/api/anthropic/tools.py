"""Reads the tools of a body of Anthropic's API, and the choice among them.

Tools that Anthropic's servers run are left out: the model does not hear of them.
"""

from __future__ import annotations

from kvtier.api.anthropic.blocks import Marks
from kvtier.api.anthropic.client_tools import is_client_tool, read_client_tool
from kvtier.api.chat.conversation import ToolChoice
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_reading import read_flat_tool
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_TOOLS
from kvtier.api.neutral_fields import Neutral, invalid, refuse_others

_RUN_BY_SERVERS = ("web_search_2", "web_fetch_2", "code_execution_2", "tool_search_tool_", "advisor_2", "mcp_toolset")
"""Beginnings of their types, which end with a date."""

_OF_IMAGES = ("computer_", "browser_")
_DIRECT = "direct"
_MAX_CALLERS = 16
_NEUTRAL: Neutral = {"input_examples": ([],)}


def read_tools(body: JsonBody, marks: Marks) -> list[Tool]:
    """Those that the client runs. Raises `HttpError`."""
    tools = [_tool(tool, index, marks) for index, tool in enumerate(body.items("tools", MAX_TOOLS) or [])]
    return [tool for tool in tools if tool is not None]


def _tool(tool: object, index: int, marks: Marks) -> Tool | None:
    path = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise invalid(path, f"{path} must be an object, not {shown(tool)}")
    body = JsonBody(tool, f"{path}.")
    kind = body.text("type") or "custom"
    marks.note(body, "tools", index)
    if kind.startswith(_RUN_BY_SERVERS):
        return None
    if kind.startswith(_OF_IMAGES):
        raise body.refuse("type", f"is {shown(kind)}: its results are images, and models here read text only")
    if is_client_tool(kind):
        found = read_client_tool(kind, body, path)
    elif kind == "custom":
        found = read_flat_tool(body, path, "input_schema")
    else:
        raise body.refuse("type", f"is {shown(kind)}: tools of this type are not supported here")
    if kind == "custom" and found.parameters is None:
        raise HttpError(400, f"{path}.input_schema is missing", "missing_field", f"{path}.input_schema")
    body.flag("eager_input_streaming")
    body.flag("defer_loading")  # there is no search for tools here: all of them are in the prompt
    callers = body.items("allowed_callers", _MAX_CALLERS)
    refuse_others(body, _NEUTRAL)
    body.refuse_rest()
    return found if callers is None or _DIRECT in callers else None


def read_tool_choice(body: JsonBody) -> tuple[ToolChoice, bool]:
    """The tool choice, and whether several calls are allowed."""
    given = body.inner("tool_choice")
    if given is None:
        return ToolChoice(), True
    kind = given.needed_text("type")
    allows_several = given.flag("disable_parallel_tool_use") is not True
    if kind == "tool":
        choice = ToolChoice("named", given.needed_text("name"))
    elif kind == "auto":
        choice = ToolChoice()
    elif kind == "any":
        choice = ToolChoice("required")
    elif kind == "none":
        choice = ToolChoice("none")
    else:
        raise given.wrong("type", "auto, any, tool or none")
    given.refuse_rest()
    return choice, allows_several
