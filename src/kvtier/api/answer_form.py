"""How the text of a chat's answer is read: which marks in it begin a call of a tool, or what the model only thinks."""

from __future__ import annotations

import msgspec


class AnswerForm(msgspec.Struct, frozen=True):
    """As a request decides it, and a process that reads large bodies hands it on.

    `tool_format` names the way in which the model writes calls, empty where the request has no tools: then such marks
    are text. `tool_names` are the tools that may be called; without `allows_several` one call is all that is shown.
    `splits_reasoning` for a model whose template knows `<think>`, `shows_reasoning` unless the client wants none of it.
    `parameter_types` are the JSON types of each tool's parameters, for formats that write values without them; a
    parameter of any type has none.
    """

    tool_format: str = ""
    tool_names: tuple[str, ...] = ()
    allows_several: bool = True
    splits_reasoning: bool = False
    shows_reasoning: bool = True
    parameter_types: dict[str, dict[str, list[str]]] = {}


PLAIN = AnswerForm()
