"""How the text of a chat's answer is parsed: the format of its tool calls, and whether it contains reasoning."""

from __future__ import annotations

import msgspec


class AnswerForm(msgspec.Struct, frozen=True):
    """Decided when a request is read, possibly in the process for large bodies.

    `tool_format` is the name of the model's format for calls; it is empty if the request has no tools, and then markers
    of calls are text. `tool_names` are the request's tools; without `allows_several`, only the first call is shown.
    `splits_reasoning` if the model's template knows `<think>`; `shows_reasoning` unless the client wants no reasoning.
    `parameter_types` has the JSON types of each tool's parameters, for formats that write values without types; the
    list is empty if a parameter may have any type. `call_kinds` has, by name, the kinds of tools whose calls are not
    shown as those of functions.
    """

    tool_format: str = ""
    tool_names: tuple[str, ...] = ()
    allows_several: bool = True
    splits_reasoning: bool = False
    shows_reasoning: bool = True
    parameter_types: dict[str, dict[str, list[str]]] = {}
    call_kinds: dict[str, str] = {}


PLAIN = AnswerForm()
