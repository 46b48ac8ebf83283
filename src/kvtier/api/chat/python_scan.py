"""Reads values in Python's syntax in a model's text while they arrive, and shows them as JSON. Nothing is evaluated.

Values are what JSON can express: strings, numbers, `True`, `False`, `None`, lists, and dictionaries whose keys are
strings. JSON's own words and escapes are read, too: models mix them.
"""

from __future__ import annotations

import json
import re

from kvtier.api.chat.json_scan import MAX_DEPTH
from kvtier.api.chat.text_source import Reading, Show, TextSource

_MAX_SCALAR_CHARACTERS = 1024
_SPACES = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"([-+]?)([0-9]+(?:_[0-9]+)*)?(?:\.([0-9]*))?(?:[eE]([-+]?[0-9]+))?")
_WORDS = {
    **{"True": "true", "False": "false", "None": "null"},
    **{"true": "true", "false": "false", "null": "null"},
}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPE_SIZES = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {
    **{"\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/"},
    **{"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"},
}
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]{1,3}")
_ENDS = {"{": "}", "[": "]"}


class PythonScan:
    """Takes a value from `source` and passes JSON of it to `show` while it arrives."""

    def __init__(self, source: TextSource, show: Show) -> None:
        self._source = source
        self._show = show

    def value(self) -> Reading[bool]:
        """False if the value is malformed or cut; malformed text is not taken. Deep nesting needs no recursion."""
        open_ends: list[str] = []
        while True:
            first = yield from self.next()
            if first in _ENDS:
                if len(open_ends) >= MAX_DEPTH:
                    return False
                self._source.take(1)
                self._show(first)
                open_ends.append(_ENDS[first])
                if not (yield from self._is_at_end(open_ends)):
                    if first == "{" and not (yield from self._key()):
                        return False
                    continue
            elif not (yield from self._simple(first)):
                return False
            if not (yield from self._close(open_ends)):
                return False
            if not open_ends:
                return True

    def next(self) -> Reading[str]:
        """The next character that is not white space, without taking it; empty at the end."""
        while first := (yield from self._source.peek()):
            count = self._source.match(_SPACES)
            if not count:
                return first
            self._source.take(count)
        return ""

    def _is_at_end(self, open_ends: list[str]) -> Reading[bool]:
        """Whether the innermost list or dictionary ends here; then its end is the next character."""
        return (yield from self.next()) == open_ends[-1]

    def _close(self, open_ends: list[str]) -> Reading[bool]:
        """Read, after a value, all closing brackets up to the start of the next value. A comma may come last."""
        while open_ends:
            following = yield from self.next()
            if following == ",":
                self._source.take(1)
                if not (yield from self._is_at_end(open_ends)):
                    self._show(", ")
                    return open_ends[-1] == "]" or (yield from self._key())
            elif following != open_ends[-1]:
                return False
            self._show(open_ends.pop())
            self._source.take(1)
        return True

    def _key(self) -> Reading[bool]:
        first = yield from self.next()
        if first not in _PLAIN or not (yield from self._text(first)) or (yield from self.next()) != ":":
            return False
        self._source.take(1)
        self._show(": ")
        return True

    def _simple(self, first: str) -> Reading[bool]:
        return (yield from self._text(first)) if first in _PLAIN else (yield from self._scalar())

    def _text(self, quote: str) -> Reading[bool]:
        """Read a string, which begins here, with one quote or three."""
        source = self._source
        end = 3 * quote if (yield from source.starts_with(3 * quote)) else quote
        source.take(len(end))
        self._show('"')
        while first := (yield from source.peek()):
            if count := source.match(_PLAIN[quote]):
                self._show(json.dumps(source.take(count), ensure_ascii=False)[1:-1])
            elif first == "\\":
                if not (yield from self._escape()):
                    return False
            elif (yield from source.skip(end)):
                self._show('"')
                return True
            else:  # a quote inside three
                self._show(json.dumps(source.take(1))[1:-1])
        return False

    def _escape(self) -> Reading[bool]:
        source = self._source
        if not (yield from source.reach(2)):
            return False
        source.take(1)
        kind = source.take(1)
        if kind in _ESCAPE_SIZES:
            return (yield from self._code(_ESCAPE_SIZES[kind]))
        if kind in "01234567":
            return (yield from self._octal(kind))
        text = _ESCAPES.get(kind, "\\" + kind)  # Python keeps the backslash of what is no escape
        self._show(json.dumps(text, ensure_ascii=False)[1:-1])
        return True

    def _code(self, size: int) -> Reading[bool]:
        source = self._source
        yield from source.reach(size)
        if source.match(_HEX) < size:
            return False
        code = int(source.take(size), 16)
        if code > 0x10FFFF:
            return False
        self._show(json.dumps(chr(code), ensure_ascii=0xD800 <= code < 0xE000)[1:-1])
        return True

    def _octal(self, first: str) -> Reading[bool]:
        source = self._source
        digits = first
        while len(digits) < 3 and (yield from source.peek()) and source.match(_OCTAL):
            digits += source.take(1)
        self._show(json.dumps(chr(int(digits, 8)), ensure_ascii=False)[1:-1])
        return True

    def _scalar(self) -> Reading[bool]:
        """Read a number or a word, which is not shown before it is complete."""
        source, length = self._source, 0
        while (yield from source.reach(length + 1)) and length <= _MAX_SCALAR_CHARACTERS:
            found = source.match(_SCALAR)
            if found == length:
                break
            length = found
        if not 0 < length <= _MAX_SCALAR_CHARACTERS:
            return False
        shown = _json_scalar(source.ahead(length))
        if not shown:
            return False
        source.take(length)
        self._show(shown)
        return True


def _json_scalar(text: str) -> str:
    """JSON of a number or a word; empty if it has none."""
    if text in _WORDS:
        return _WORDS[text]
    found = _NUMBER.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return ""
    whole = (found[2] or "0").replace("_", "").lstrip("0") or "0"
    fraction = "" if found[3] is None else f".{found[3] or 0}"
    exponent = "" if found[4] is None else f"e{found[4]}"
    return f"{found[1].replace('+', '')}{whole}{fraction}{exponent}"
