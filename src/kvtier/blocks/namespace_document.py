"""What a namespace covers, as a document that came from another process: JSON of bounded depth. Any thread."""

from __future__ import annotations

import msgspec

from kvtier.errors import TierRefused

_MAX_DEPTH = 16


def read_fields(text: str) -> dict[str, object]:
    """Raises `TierRefused` unless it is a JSON object, in ASCII, of bounded depth."""
    if not text.isascii():  # a bound on characters would be none on what they are written as
        raise TierRefused("the fields of a namespace must be JSON in ASCII")
    try:
        fields: dict[str, object] = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise TierRefused(f"the fields of a namespace must be a JSON object: {error}") from error
    level: list[object] = [fields]
    for _ in range(_MAX_DEPTH):
        level = [inner for value in level for inner in _values(value)]
        if not level:
            return fields
    raise TierRefused(f"the fields of a namespace must not be nested more than {_MAX_DEPTH} deep")


def _values(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
