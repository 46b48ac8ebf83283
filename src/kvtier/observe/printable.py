"""Turns foreign text (from a file, a client, a folder) into one line that is safe to print on a terminal."""

from __future__ import annotations

import unicodedata

_SHORT = 200
_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of characters that move the cursor, change colours, reverse or break lines, or are unassigned."""


def printable(text: str, limit: int = _SHORT) -> str:
    """`text` with unsafe characters written as escapes, cut after `limit` characters."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(
        _escaped(character) if unicodedata.category(character) in _UNSAFE else character for character in cut
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
