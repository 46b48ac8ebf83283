"""Sizes as callers write them: whole numbers of Python or numpy."""

from __future__ import annotations

import operator

from kvtier.errors import ConfigError


def whole_number(name: str, value: object, *, least: int = 1, most: int = 1 << 40) -> int:
    """`value` as an `int`. Raises `ConfigError` with a sentence about `name` unless it is one, from `least` to `most`.

    True and False are not numbers.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, not {value!r}") from None
    if isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if not least <= number <= most:
        raise ConfigError(f"{name} must be from {least} to {most}, not {number}")
    return number
