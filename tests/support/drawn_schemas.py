"""Schemas drawn from JSON Schema's own description of schemas (draft 2020-12): any keyword beside any other.

hypothesis-jsonschema would draw from the same description, but has no release for the Hypothesis that is used here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY

_NOT_FOLLOWED = {
    *("contains", "minContains", "maxContains", "if", "then", "else", "not", "propertyNames", "uniqueItems"),
    *("dependentSchemas", "dependentRequired", "unevaluatedItems", "unevaluatedProperties"),
}
"""Keywords that llguidance refuses."""

_CHECKED_FIRST = frozenset({"allOf", "oneOf", "patternProperties"})
"""Grammars with these are first compiled in a process of their own, so few schemas of `followed_schemas` have them."""
_PLAIN_SHARE = 4
_VOCABULARIES = ("applicator", "unevaluated", "validation", "meta-data", "format-annotation")
_MAX_DEPTH = 2
_MAX_KEYWORDS = 4
_NAMES = st.text(st.characters(codec="utf-8"), max_size=5)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9, width=16) | _NAMES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=3,
)
_PATTERNS = st.lists(
    st.sampled_from(["a", "[b-d]", r"\d", r"\w", "(x|yz)", "é", " ", r"\.", "^", "$"]).flatmap(
        lambda piece: st.sampled_from([piece, piece, f"(?:{piece})?", f"(?:{piece}){{1,3}}", f"(?:{piece})*"])
    ),
    max_size=4,
).map("".join)
_FORMATS = st.sampled_from(
    [*("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"), "int32", "regex"]
)


def drawn_schemas() -> st.SearchStrategy[Any]:
    """Of any keywords."""
    return _levels(_keywords(), 0)


def followed_schemas() -> st.SearchStrategy[Any]:
    """Of keywords that llguidance knows: most of them are accepted."""
    return _levels({name: one for name, one in _keywords().items() if name not in _NOT_FOLLOWED}, 0)


@st.composite
def _levels(draw: st.DrawFn, known: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Nearly all that have no type allow nearly anything, so most have one."""
    fitting = [
        name
        for name in sorted(known)
        if depth < _MAX_DEPTH or "$dynamicRef" not in str(known[name])
        for _ in range(1 if name in _CHECKED_FIRST else _PLAIN_SHARE)
    ]
    names = draw(st.lists(st.sampled_from(fitting), max_size=_MAX_KEYWORDS, unique=True))
    if draw(st.integers(0, 3)):
        names.append("type")
    return {name: draw(_named(known, name, depth)) for name in dict.fromkeys(names)}


@functools.cache
def _keywords() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _VOCABULARIES:
        vocabulary: Any = REGISTRY.contents(f"https://json-schema.org/draft/2020-12/meta/{name}")
        found |= {key: _resolved(one, vocabulary) for key, one in vocabulary["properties"].items()}
    return found


def _resolved(described: Any, vocabulary: Mapping[str, Any]) -> Any:
    """Without references to the vocabulary's definitions."""
    if isinstance(described, list):
        return [_resolved(one, vocabulary) for one in described]
    if not isinstance(described, dict):
        return described
    if "$ref" in described:
        return _resolved(vocabulary["$defs"][described["$ref"].rpartition("/")[2]], vocabulary)
    return {key: _resolved(one, vocabulary) for key, one in described.items()}


def _named(known: Mapping[str, Any], name: str, depth: int) -> st.SearchStrategy[Any]:
    """The values of a keyword; those of `format` and `enum` are hardly described."""
    if name == "format":
        return _FORMATS
    return st.lists(_VALUES, min_size=1, max_size=3) if name == "enum" else _described(known, known[name], depth)


def _described(known: Mapping[str, Any], described: Any, depth: int) -> st.SearchStrategy[Any]:
    if described is True or not described:
        return _VALUES
    if "$dynamicRef" in described:
        inner = _levels(known, depth + 1)
        return st.one_of(st.booleans(), inner, inner)
    if "anyOf" in described:
        return st.one_of([_described(known, one, depth) for one in described["anyOf"]])
    if "enum" in described:
        return st.sampled_from(described["enum"])
    kind = described["type"]
    if kind == "object":
        names = _PATTERNS if described.get("propertyNames", {}).get("format") == "regex" else _NAMES
        return st.dictionaries(names, _described(known, described["additionalProperties"], depth), max_size=3)
    if kind == "array":
        least, is_unique = described.get("minItems", 0), described.get("uniqueItems", False)
        items = _described(known, described["items"], depth)
        return st.lists(items, min_size=least, max_size=3, unique_by=repr if is_unique else None)
    return _plain(kind, described)


def _plain(kind: str, described: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(0, 6)
    if kind == "number":
        least = 1 if "exclusiveMinimum" in described else -50
        return st.integers(least, 50) | st.integers(2 * least, 100).map(lambda number: number / 2)
    return _PATTERNS if described.get("format") == "regex" else _NAMES
