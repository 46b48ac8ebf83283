"""Which schemas no finite value follows."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.engine.constraint.endless import can_end

_SELF = {"$ref": "#"}


def _object(inner: object, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}, "required": list(required)}


@pytest.mark.parametrize(
    "schema",
    [
        _SELF,
        _object(_SELF, "a"),
        _object({"$ref": "#/properties/a"}, "a"),
        _object({"anyOf": [_SELF, {"type": "array", "items": _SELF, "minItems": 1}]}, "a"),
        _object({"allOf": [{"type": "object"}, _SELF]}, "a"),
        {"type": "array", "prefixItems": [{"type": "null"}, _SELF], "minItems": 2},
        {"$ref": "#/$defs/x~1y", "$defs": {"x/y": _object({"$ref": "#/$defs/z%20z"}, "a"), "z z": {"oneOf": [_SELF]}}},
    ],
)
def test_a_schema_that_always_needs_itself_has_no_end(schema: dict[str, Any]) -> None:
    assert not can_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        _object(_SELF),
        _object({"anyOf": [_SELF, {"type": "null"}]}, "a"),
        _object({"type": "array", "items": _SELF}, "a"),
        _object({"type": "array", "prefixItems": [{}, _SELF], "minItems": 1}, "a"),
        _object({"type": "array", "items": _SELF, "minItems": -1}, "a"),
        {**_object(_SELF, "a"), "type": ["object", "null"]},
        {"properties": {"a": _SELF}, "required": ["a"]},
        {**_object(_SELF, "a"), "enum": [1]},
        _object({"$ref": "#elsewhere"}, "a"),
        _object({"$ref": "#/nowhere"}, "a"),
        _object({"$ref": 5}, "a"),
        {"anyOf": [_object({"$ref": f"#/anyOf/{'9' * 5000}"}, "a")]},
        _object({"$id": "other", **_SELF}, "a"),
        _object(True, "a"),
        {"const": _object(_SELF, "a")},
    ],
)
def test_any_other_schema_may_have_one(schema: dict[str, Any]) -> None:
    assert can_end(schema)


def test_a_long_chain_is_followed_and_a_huge_schema_is_left_to_the_answer() -> None:
    def chain(length: int, last: object) -> dict[str, Any]:
        parts = {f"d{number}": _object({"$ref": f"#/$defs/d{number + 1}"}, "a") for number in range(length)}
        return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": last}}

    assert can_end(chain(1000, {"type": "null"}))
    assert not can_end(chain(1000, _SELF))
    assert can_end(chain(3000, _SELF))
