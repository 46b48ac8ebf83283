"""Finds JSON schemas that no finite value follows, such as objects that require a part like themselves.

The library compiles them, and its answers begin; the dead end shows only within them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import unquote

_MAX_PARTS = 5_000
_MAX_ROUNDS = 16
_MAX_DIGITS = 6

_Parts = list["_Part"]


class _Part:
    """A schema within the whole one. It has an end if one of each group of parts has."""

    __slots__ = ("can_end", "groups")

    def __init__(self) -> None:
        self.groups: list[_Parts] = []
        self.can_end = False


def can_end(whole: Mapping[str, object]) -> bool:
    """False if every value that follows the schema contains itself again; True if in doubt, as for huge schemas."""
    root = _Part()
    parts: dict[int, _Part] = {id(whole): root}
    order = [root]
    left: list[tuple[Mapping[str, object], _Part]] = [(whole, root)]

    def part_of(schema: object) -> _Part | None:
        """The part for a schema; None if it is none, or is allowed anything."""
        if not isinstance(schema, dict):
            return None
        part = parts.get(id(schema))
        if part is None:
            part = parts[id(schema)] = _Part()
            order.append(part)
            left.append((schema, part))
        return part

    while left:
        schema, part = left.pop()
        if len(order) > _MAX_PARTS or ("$id" in schema and part is not root):  # which changes what references mean
            return True
        for group in _groups(schema, whole):
            ways = [part_of(one) for one in group]
            known = [one for one in ways if one is not None]
            if known and len(known) == len(ways):
                part.groups.append(known)
    return _settled(root, order)


def _settled(root: _Part, order: _Parts) -> bool:
    """From parts without parts to those that need them, until nothing changes."""
    for _ in range(_MAX_ROUNDS):
        is_changed = False
        for part in reversed(order):
            if not part.can_end and all(any(one.can_end for one in group) for group in part.groups):
                part.can_end = is_changed = True
        if root.can_end or not is_changed:
            return root.can_end
    return True


def _groups(schema: Mapping[str, object], whole: Mapping[str, object]) -> list[list[object]]:
    """Groups of schemas: a value that follows `schema` contains, or is, one of each group."""
    if "const" in schema or "enum" in schema:
        return []
    groups: list[list[object]] = []
    if "$ref" in schema:
        groups.append([_referred(schema["$ref"], whole)])
    for key in ("anyOf", "oneOf"):
        ways = schema.get(key)
        if isinstance(ways, list):
            groups.append(ways)
    every = schema.get("allOf")
    if isinstance(every, list):
        groups += [[one] for one in every]
    needed = _NEEDED.get(schema["type"]) if isinstance(schema.get("type"), str) else None
    return groups if needed is None else groups + [[one] for one in needed(schema)]


def _properties(schema: Mapping[str, object]) -> list[object]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return []
    return [properties[name] for name in required if isinstance(name, str) and name in properties]


def _elements(schema: Mapping[str, object]) -> list[object]:
    num_needed, first = schema.get("minItems"), schema.get("prefixItems")
    if not isinstance(num_needed, int) or num_needed <= 0:
        return []
    first = first if isinstance(first, list) else []
    return first[:num_needed] + ([schema.get("items")] if num_needed > len(first) else [])


_NEEDED: Mapping[object, Callable[[Mapping[str, object]], list[object]]] = {"object": _properties, "array": _elements}


def _referred(reference: object, whole: Mapping[str, object]) -> object:
    """The schema at `#/...` of the whole one; None if it is not there."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    found: object = whole
    for word in unquote(reference[1:]).split("/")[1:]:
        name = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) <= _MAX_DIGITS and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
