"""Sizes as users write them: `20GiB`, `512MiB`, `1.5TiB`, plain bytes. Binary units only."""

from __future__ import annotations

import re
from fractions import Fraction

from kvtier.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_LIMIT = 1 << 63
_MAX_CHARACTERS = 64
_SIZE = re.compile(r"([0-9]++(?:\.[0-9]++)?)[ \t]*+([A-Za-z]*+)")


def parse_size(text: str | int) -> int:
    """Bytes in `text`. Raises `ConfigError` for anything that is not a positive size in a known unit."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) and len(text) <= _MAX_CHARACTERS else None
        if found is None or found[2].lower() not in _UNITS:
            raise ConfigError(f"{_shown(text)} is not a size: write a number with B, KiB, MiB, GiB or TiB, as in 20GiB")
        size = int(Fraction(found[1]) * _UNITS[found[2].lower()])
    if not 0 < size < _LIMIT:
        raise ConfigError(f"{_shown(text)} is not a size: it must be more than nothing and less than 8192PiB")
    return size


def _shown(text: object) -> str:
    """A value as quoted in an error, truncated if it is long."""
    try:
        quoted = repr(text)
    except ValueError:  # a whole number with thousands of digits
        return "this number"
    return quoted if len(quoted) <= _MAX_CHARACTERS + 2 else quoted[:_MAX_CHARACTERS] + "..."


def format_size(nbytes: int) -> str:
    """The largest unit that keeps the number at or above one, with at most two decimals."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f}".rstrip("0").rstrip(".") + unit
    return f"{nbytes}B"
