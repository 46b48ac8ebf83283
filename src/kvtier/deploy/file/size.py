"""Sizes in deployment files: text with a unit, or a plain number, which is GiB."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.sizes import parse_size

_GIB = 1 << 30
_LIMIT_GIB = 1 << 33
SIZE_IN_WORDS = "a size such as 20GiB, or a plain number, which is GiB"


class Size(int):
    """A number of bytes, possibly zero."""


def read_size(value: object) -> Size:
    """Raises `ConfigError` for an invalid size. Text needs a unit: a plain number in quotes could be either."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if 0 <= value < _LIMIT_GIB:
            return Size(value * _GIB)
    elif isinstance(value, str) and not value.strip().replace(".", "", 1).isdigit():
        return Size(parse_size(value))
    raise ConfigError(f"{value!r} is not {SIZE_IN_WORDS}")
