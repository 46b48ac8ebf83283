"""Constraints on what an answer looks like, whatever the model prefers. No torch: the API uses it too."""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec

from kvtier.errors import InvalidParameter

MAX_GRAMMAR_CHARACTERS = 256 << 10
"""Limit on the length of one grammar, of any kind."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language that an answer has to follow.

    `text` is a JSON schema, a regular expression, or a grammar in Lark's syntax, depending on `kind`; in Lark's,
    `%json` contains a schema. Equal grammars are compiled once.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidParameter(
                f"grammar must not have more than {MAX_GRAMMAR_CHARACTERS} characters, but has {len(self.text)}"
            )


DEAD_END = "the grammar allows no answer from here: neither another token nor an end"
"""The error of an answer that its grammar does not let continue."""

LARK_INSIDE = re.compile(r"%lark \{\n// ([0-9]{1,6}) characters\n")
"""The start of what `lark_inside` writes."""


def lark_inside(text: str) -> str:
    """A client's rules as part of a grammar in Lark's syntax, preceded by their length: they may contain anything."""
    return f"%lark {{\n// {len(text)} characters\n{text}\n}}"


def lark_text(text: str) -> str:
    """A text as Lark's syntax quotes it, without a `%json` that looks like the start of a schema."""
    return json.dumps(text, ensure_ascii=False).replace("%json", r"\u0025json")


TEMPLATE_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""For `x-guidance` of a schema inside a grammar in Lark's syntax: JSON with the spacing of chat templates."""

JSON_OBJECT = Grammar("json_schema", '{"type":"object"}')
"""Any JSON object, as for OpenAI's `json_object`."""
