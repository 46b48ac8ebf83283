"""The text in a call of a custom tool, whose arguments are an object with this text alone."""

from __future__ import annotations

import re

from kvtier.api.json_body import decode_inner

INPUT = "input"
"""The name of the text in the arguments."""

_HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_MAX_HEAD_CHARACTERS = 256
_PIECE = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]|\\u')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}
_ESCAPE_CHARACTERS = len("\\u0000")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class InputText:
    """Takes the text out of the arguments while they arrive. The joined text does not depend on how they are cut.

    Arguments of another form, which a model without a grammar may write, are passed on once they are complete: the only
    text in them, or else all of them.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._held = ""
        self._is_in_text = False
        self._is_over = False
        self._has_other_form = False
        self._surrogate = 0  # the first half of a character, until the second one has arrived

    def push(self, arguments: str) -> str:
        """The next characters of the text."""
        if self._is_over:
            return ""
        if self._is_in_text:
            self._held += arguments
            return self._decoded()
        self._arguments.append(arguments)
        if self._has_other_form:
            return ""
        self._held += arguments
        head = _HEAD.match(self._held)
        if head is None:
            self._has_other_form = len(self._held) > _MAX_HEAD_CHARACTERS
            return ""
        self._is_in_text, self._held = True, self._held[head.end() :]
        return self._decoded()

    def finish(self) -> str:
        """No more arguments come."""
        if self._is_over:
            return ""
        self._is_over = True
        if not self._is_in_text:
            return _other_text("".join(self._arguments))
        return _UNKNOWN if self._surrogate else ""

    def _decoded(self) -> str:
        found, held, position = [], self._held, 0
        while position < len(held) and not self._is_over:
            if held[position] == '"':
                self._is_over = True
                found.append(self._half())
                break
            piece = _PIECE.match(held, position)
            if piece is None or self._is_cut(piece[0], len(held) - position):
                break
            position = piece.end()
            found.append(self._character(piece[0]))
        self._held = held[position:]
        return "".join(found)

    def _is_cut(self, piece: str, num_left: int) -> bool:
        """Whether this is the beginning of an escape that has not arrived as a whole."""
        return piece == "\\u" and num_left < _ESCAPE_CHARACTERS

    def _character(self, piece: str) -> str:
        if not piece.startswith("\\u") or piece == "\\u":
            plain = piece if piece[0] != "\\" or piece == "\\u" else _ESCAPES.get(piece[1], piece)
            return self._half() + plain
        unit = int(piece[2:], 16)
        if 0xDC00 <= unit < 0xE000:
            first, self._surrogate = self._surrogate, 0
            return chr(0x10000 + ((first - 0xD800) << 10) + unit - 0xDC00) if first else _UNKNOWN
        before = self._half()
        if 0xD800 <= unit < 0xDC00:
            self._surrogate = unit
            return before
        return before + chr(unit)

    def _half(self) -> str:
        """What stands for a first half without a second one."""
        had, self._surrogate = self._surrogate, 0
        return _UNKNOWN if had else ""


def input_text(arguments: str) -> str:
    """The text in complete arguments."""
    text = InputText()
    return text.push(arguments) + text.finish()


def _other_text(arguments: str) -> str:
    try:
        found = decode_inner(arguments or "{}")
    except ValueError:
        return arguments
    if not found:
        return ""
    values = list(found.values()) if isinstance(found, dict) else [found]
    if isinstance(found, dict) and INPUT in found:
        values = [found[INPUT]]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
