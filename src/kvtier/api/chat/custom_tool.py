"""Custom tools of OpenAI's APIs, which take text: for the model, functions with one text as their argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.api.chat.input_text import INPUT
from kvtier.api.chat.tool import CUSTOM, Tool
from kvtier.api.chat.tool_reading import read_tool_name
from kvtier.api.json_body import JsonBody
from kvtier.engine.grammar import MAX_GRAMMAR_CHARACTERS

_SYNTAXES = ("lark", "regex")
_LARK = "The input must follow this grammar, in Lark's syntax:"
_REGEX = "The input must match this regular expression:"

GrammarOf = Callable[[JsonBody], JsonBody]
"""The object with `syntax` and `definition`, given a format of the type `grammar`."""


def read_custom_tool(body: JsonBody, path: str, given: Mapping[str, object], grammar_of: GrammarOf) -> Tool:
    """Read `name`, `description` and `format`; `given` is the whole tool. Raises `HttpError`.

    A regular expression is enforced. Rules in Lark's syntax cannot be enforced inside of JSON: the model reads them.
    """
    name = read_tool_name(body, path)
    description = body.text("description") or ""
    form = body.inner("format")
    syntax, definition = ("", "") if form is None else _read_format(form, grammar_of)
    text: dict[str, object] = {"type": "string"}
    if definition:
        told = f"{_LARK if syntax == 'lark' else _REGEX}\n{definition}"
        description = f"{description}\n\n{told}" if description else told
    pattern = definition if syntax == "regex" else ""
    if pattern:
        text["pattern"] = f"^(?:{pattern})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function: dict[str, object] = {"name": name, "parameters": schema}
    if description:
        function = {"name": name, "description": description, "parameters": schema}
    document: dict[str, object] = {"type": "function", "function": function}
    return Tool(name, schema, document, is_strict=bool(pattern), kind=CUSTOM, given=given, pattern=pattern)


def _read_format(body: JsonBody, grammar_of: GrammarOf) -> tuple[str, str]:
    """The syntax and the text of the grammar; both are empty for any text."""
    kind = body.needed_text("type")
    if kind not in ("text", "grammar"):
        raise body.wrong("type", "text or grammar")
    if kind == "text":
        body.refuse_rest()
        return "", ""
    grammar = grammar_of(body)
    syntax = grammar.needed_text("syntax")
    if syntax not in _SYNTAXES:
        raise grammar.wrong("syntax", " or ".join(_SYNTAXES))
    grammar.needed_text("definition")
    definition = grammar.short_text("definition", MAX_GRAMMAR_CHARACTERS) or ""
    if not definition:
        raise grammar.wrong("definition", "text that is not empty")
    grammar.refuse_rest()
    body.refuse_rest()
    return syntax, definition
