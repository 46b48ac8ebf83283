"""Finds the end of a JSON value in a model's text while it arrives, and checks its syntax. No value is built."""

from __future__ import annotations

import json
import re

from kvtier.api.chat.text_source import Reading, Show, TextSource

MAX_DEPTH = 128
_MAX_SCALAR_CHARACTERS = 1024
_SPACES = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR_TEXT = r"(?:true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)"
_RIGHT_SCALAR = re.compile(_SCALAR_TEXT)
_SCALARS = re.compile(rf"(?:{_SCALAR_TEXT}[ \t\n\r]*+,[ \t\n\r]*+)+")
"""Several scalars of a list, each with its comma, so that long lists of numbers are read in one match."""

_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ENDS = {"{": "}", "[": "]"}


class JsonScan:
    """Takes a value from `source` and passes its text to `show` while it arrives.

    Control characters inside strings, which models write and JSON forbids, are escaped for `show`. `keep` gets the
    original text.
    """

    def __init__(self, source: TextSource, show: Show | None, keep: Show | None = None) -> None:
        self._source = source
        self._shows = [one for one in (show, keep) if one is not None]
        self._escaped = show
        self._keep = keep

    def value(self) -> Reading[bool]:
        """False if the value is malformed or cut; malformed text is not taken. Deep nesting needs no recursion."""
        open_ends: list[str] = []
        while True:
            is_right, is_begun = yield from self._begin(open_ends)
            if not is_right:
                return False
            if is_begun:
                continue
            is_right = yield from self._close(open_ends)
            if not is_right or not open_ends:
                return is_right

    def text(self) -> Reading[bool]:
        """Read a string, from its opening quote."""
        source = self._source
        self._show(source.take(1))
        while first := (yield from source.peek()):
            if count := source.match(_PLAIN):
                self._show(source.take(count))
            elif first == '"':
                self._show(source.take(1))
                return True
            elif first == "\\":
                if not (yield from self._escape()):
                    return False
            else:
                self._control(source.take(1))
        return False

    def next(self) -> Reading[str]:
        """The next character that is not white space, without taking it; empty at the end. White space is shown."""
        while first := (yield from self._source.peek()):
            count = self._source.match(_SPACES)
            if not count:
                return first
            self._show(self._source.take(count))
        return ""

    def key(self) -> Reading[bool]:
        """Read a string and the colon after it."""
        if (yield from self.next()) != '"' or not (yield from self.text()):
            return False
        return (yield from self.sign(":"))

    def sign(self, sign: str) -> Reading[bool]:
        if (yield from self.next()) != sign:
            return False
        self._show(self._source.take(1))
        return True

    def _begin(self, open_ends: list[str]) -> Reading[tuple[bool, bool]]:
        """Read a simple value, or the start of an object or list; returns (is well-formed, is a start)."""
        first = yield from self.next()
        if open_ends and open_ends[-1] == "]" and (count := self._source.match(_SCALARS)):
            self._show(self._source.take(count))
            first = yield from self.next()
        if first in _ENDS:
            if len(open_ends) >= MAX_DEPTH:
                return False, False
            self._show(self._source.take(1))
            open_ends.append(_ENDS[first])
            if (yield from self.next()) == open_ends[-1]:
                return True, False
            return open_ends[-1] == "]" or (yield from self.key()), True
        if first == '"':
            return (yield from self.text()), False
        return (yield from self._scalar()), False

    def _close(self, open_ends: list[str]) -> Reading[bool]:
        """Read, after a value, all closing brackets up to the start of the next value."""
        while open_ends:
            following = yield from self.next()
            if following == open_ends[-1]:
                open_ends.pop()
                self._show(self._source.take(1))
            elif following == ",":
                self._show(self._source.take(1))
                return open_ends[-1] == "]" or (yield from self.key())
            else:
                return False
        return True

    def _show(self, text: str) -> None:
        for show in self._shows:
            show(text)

    def _control(self, character: str) -> None:
        if self._escaped is not None:
            self._escaped(json.dumps(character)[1:-1])
        if self._keep is not None:
            self._keep(character)

    def _escape(self) -> Reading[bool]:
        source = self._source
        for count in (2, 6):
            yield from source.reach(count)
            if found := source.match(_ESCAPE):
                self._show(source.take(found))
                return True
        return False

    def _scalar(self) -> Reading[bool]:
        """Read a number or a word, which is not shown before it is complete."""
        source, length = self._source, 0
        while (yield from source.reach(length + 1)) and length <= _MAX_SCALAR_CHARACTERS:
            found = source.match(_SCALAR)
            if found == length:
                break
            length = found
        if not length or length > _MAX_SCALAR_CHARACTERS or source.match(_RIGHT_SCALAR) != length:
            return False
        self._show(source.take(length))
        return True
