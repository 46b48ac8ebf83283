"""Calls that are a JSON object with the tool's name and its arguments."""

from __future__ import annotations

import json

from kvtier.api.chat.json_scan import JsonScan
from kvtier.api.chat.part_sink import PartSink, is_name
from kvtier.api.chat.text_source import Reading, TextSource

_ARGUMENT_KEYS = ("arguments", "parameters")


class ObjectCall:
    """Reads one such object. Its arguments are passed on while they arrive, if the name comes before them.

    `held` has the text that may not be a call. It is emptied when the call begins; malformed text after the arguments
    is added to it. When `read` has ended, the caller treats all of it as text.
    """

    def __init__(self, source: TextSource, sink: PartSink, held: list[str], *, needs_arguments: bool = False) -> None:
        self._source = source
        self._sink = sink
        self._held = held
        self._needs_arguments = needs_arguments
        self._scan = JsonScan(source, None, held.append)
        self._name = ""
        self._arguments = ""
        self._has_begun = False

    def read(self) -> Reading[bool]:
        """Whether the object is complete, and a call."""
        scan = self._scan
        if not (yield from scan.sign("{")):
            return False
        if (yield from scan.next()) == "}":
            return False
        while (yield from self._member()):
            if (yield from scan.next()) == "}":
                self._held.append(self._source.take(1))
                return self._end()
            if not (yield from scan.sign(",")):
                break
        return False

    def _member(self) -> Reading[bool]:
        scan = self._scan
        if (yield from scan.next()) != '"':
            return False
        key = yield from self._string()
        if key is None or not (yield from scan.sign(":")):
            return False
        first = yield from scan.next()
        if key == "name" and first == '"':
            self._name = (yield from self._string()) or ""
            return bool(self._name)
        if key in _ARGUMENT_KEYS and not self._has_begun:
            return (yield from self._value(is_object=first == "{"))
        return (yield from scan.value())

    def _value(self, *, is_object: bool) -> Reading[bool]:
        """Read the value of the arguments."""
        if is_object and is_name(self._name):
            self._begin()
            return (yield from JsonScan(self._source, self._sink.arguments).value())
        pieces: list[str] = []
        is_right = yield from JsonScan(self._source, pieces.append, self._held.append).value()
        self._arguments = "".join(pieces)
        return is_right

    def _string(self) -> Reading[str | None]:
        pieces: list[str] = []
        is_right = yield from JsonScan(self._source, pieces.append, self._held.append).text()
        return str(json.loads("".join(pieces))) if is_right else None

    def _begin(self) -> None:
        self._has_begun = True
        self._sink.begin(self._name)
        self._held.clear()

    def _end(self) -> bool:
        if self._has_begun:
            self._held.clear()
            return True
        arguments = _as_object(self._arguments)
        if not is_name(self._name) or arguments is None or (self._needs_arguments and not self._arguments):
            return False
        self._begin()
        self._sink.arguments(arguments)
        return True


def is_json(text: str) -> bool:
    """Whether the whole text is one JSON value that is not nested too deeply."""
    source = TextSource()
    source.add(text)
    source.end()

    def whole() -> Reading[bool]:
        is_right = yield from JsonScan(source, None).value()
        yield from source.spaces()
        return is_right and not (yield from source.peek())

    try:
        next(whole())
    except StopIteration as over:
        return bool(over.value)
    raise AssertionError("a complete text never waits for more")


def _as_object(arguments: str) -> str | None:
    """Arguments as a JSON object; models also write null, or an object inside a string. None for anything else."""
    if arguments.startswith('"'):
        arguments = json.loads(arguments)
    arguments = arguments.strip()
    if arguments in ("", "null"):
        return "{}"
    return arguments if arguments.startswith("{") and is_json(arguments) and _is_whole(arguments) else None


def _is_whole(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which a JSON escape can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
