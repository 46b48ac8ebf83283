"""The `format` of strings in a schema: formats known to the library are enforced, others are ignored.

OpenAPI and MCP use formats of their own everywhere (`int32`, `password`), so they are no reason to refuse a schema. Nor
is a keyword that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_FORMAT = "format"
KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"},
)
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})
"""Keywords whose values are not schemas: a constant may have a key `format`."""

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are objects of schemas, under names that the client chose."""


def with_known_formats(schema: Mapping[str, object]) -> dict[str, object]:
    """The schema without formats and neutral keywords that the library would refuse.

    Recursion is bounded by the depth of its JSON.
    """
    return {key: _kept(key, value) for key, value in schema.items() if not _is_unknown(key, value)}


def _kept(key: str, value: object) -> object:
    if key in _VALUES:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _inner(one) for name, one in value.items()}
    return _inner(value)


def _inner(value: object) -> object:
    if isinstance(value, list):
        return [_inner(one) for one in value]
    return with_known_formats(value) if isinstance(value, dict) else value


def _is_unknown(key: str, value: object) -> bool:
    if key == "uniqueItems" and value is False:
        return True
    return key == _FORMAT and isinstance(value, str) and value not in KNOWN_FORMATS
