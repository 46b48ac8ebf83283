"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FUNCTION: Final = "function"
CUSTOM: Final = "custom"
"""A tool that takes text: its arguments are an object with this text alone."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `document` has the form of OpenAI's chat API, for chat templates.

    With `is_strict`, its arguments are forced to follow `parameters`, a JSON schema.
    """

    name: str
    parameters: Mapping[str, object] | None
    document: dict[str, object]
    is_strict: bool = False
    kind: str = FUNCTION
    """How its calls are shown in an answer; for the model every tool is a function."""
    given: Mapping[str, object] | None = None
    """The tool as the client describes it, if that is not as a function."""
    pattern: str = ""
    """With `is_strict`, a regular expression for all its text parameters, in formats that write them without quotes."""


def properties_of(schema: Mapping[str, object] | None) -> dict[str, object]:
    """The schemas of a tool's parameters, by name."""
    found = (schema or {}).get("properties")
    return found if isinstance(found, dict) else {}


def types_of(schema: object) -> list[str]:
    """The JSON types that a value of this schema may have; empty if any type is allowed, or it is unknown."""
    if not isinstance(schema, dict):
        return []
    given = schema.get("type")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        return given
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _joined_types([types_of(one) if _is_simple(one) else [] for one in schema[key]])
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return ["string"]
    return []


def _is_simple(schema: object) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("type"), str)


def _joined_types(found: list[list[str]]) -> list[str]:
    if not all(found):
        return []
    return list(dict.fromkeys(kind for kinds in found for kind in kinds))
