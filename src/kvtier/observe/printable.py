"""Text from elsewhere (a file, a client, a folder) as one line that is safe to show on a terminal."""

from __future__ import annotations

import unicodedata

_SHORT = 200
_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Kinds of characters that move the cursor, change colours, reverse or break the line, or are unassigned."""


def printable(text: str, limit: int = _SHORT) -> str:
    """`text` with special characters written as escapes, and cut after `limit` characters."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(
        _escaped(character) if unicodedata.category(character) in _UNSAFE else character for character in cut
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
