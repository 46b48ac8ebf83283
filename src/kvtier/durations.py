"""Times as users write them: `7d`, `12h`, `90m`, `30s`, plain seconds."""

from __future__ import annotations

import re

from kvtier.errors import ConfigError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_MAX_CHARACTERS = 32
_MAX_S = 10 * 366 * 86_400.0
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)[ \t]*([smhdw]?)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds in `text`. Raises `ConfigError` unless it is a positive time of up to ten years."""
    found = _DURATION.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    seconds = float(found[1]) * _UNITS[found[2]] if found is not None else 0.0
    if not 0 < seconds <= _MAX_S:
        raise ConfigError(f"{text[:_MAX_CHARACTERS]!r} is not a time: write a number with s, m, h, d or w, as in 7d")
    return seconds
