"""Calls with one element for each argument, whose value is plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.api.chat.part_sink import PartSink
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool_formats.object_call import is_json

_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Constants as templates without JSON write them, and in JSON."""


@dataclass(frozen=True, slots=True)
class Elements:
    """The texts around a parameter's name and value. `value_begin` follows the name, after any white space.

    With `has_lines`, a value is on lines of its own. Models leave out `value_end` after the last value at times: if an
    answer ends with all of `call_ends`, or the first of them, that value ends before them.
    """

    name_begin: str
    name_end: str
    value_begin: str
    value_end: str
    has_lines: bool
    call_ends: tuple[str, ...] = ()


class ElementCall:
    """Reads the arguments of a call that has begun; `types` has the types of its tool's parameters."""

    def __init__(
        self, source: TextSource, sink: PartSink, elements: Elements, types: Mapping[str, Sequence[str]]
    ) -> None:
        self._source = source
        self._sink = sink
        self._elements = elements
        self._types = types
        self._num_values = 0

    def read(self) -> Reading[str]:
        """Read all parameters; returns the text after them that was taken, which is white space as a rule.

        A value that is cut leaves the arguments incomplete, as in any call that is cut.
        """
        source, elements = self._source, self._elements
        while True:
            spaces = yield from source.spaces()
            if not (yield from source.starts_with(elements.name_begin)):
                break
            source.take(len(elements.name_begin))
            name = yield from source.word((elements.name_end,))
            if not (yield from source.skip(elements.name_end)):
                spaces += elements.name_begin
                break
            if elements.value_begin:
                yield from source.spaces()
                yield from source.skip(elements.value_begin)
            if not (yield from self._value(name.strip())):
                return ""
        self._sink.arguments("}" if self._num_values else "{}")
        return spaces

    def _value(self, name: str) -> Reading[bool]:
        """Read a value; False if it is cut."""
        self._sink.arguments(f"{', ' if self._num_values else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_values += 1
        types = self._types.get(name, ("string",))
        value = _TextValue(self._sink, has_lines=self._elements.has_lines, is_text=list(types) == ["string"])
        first, *others = self._elements.call_ends or ("",)
        marks = (self._elements.value_end, first) if first else (self._elements.value_end,)
        while True:
            end = yield from self._source.until(marks, value.add)
            if end != first or not end:
                break
            passed = yield from self._passed(others)
            if not (yield from self._source.peek()):
                break  # only the end of the value is missing
            value.add(end + passed)
        value.end(types, is_whole=bool(end))
        return bool(end)

    def _passed(self, ends: Sequence[str]) -> Reading[str]:
        """Take those of `ends` that follow, and all white space around them."""
        passed = yield from self._source.spaces()
        for end in ends:
            if (yield from self._source.skip(end)):
                passed += end + (yield from self._source.spaces())
        return passed


class _TextValue:
    """A value that arrives in pieces. If it `is_text`, pieces are passed on at once; others need the whole value."""

    def __init__(self, sink: PartSink, *, has_lines: bool, is_text: bool) -> None:
        self._sink = sink
        self._has_lines = has_lines
        self._is_text = is_text
        self._is_first = True
        self._held = ""
        self._pieces: list[str] = []
        if is_text:
            sink.arguments('"')

    def add(self, text: str) -> None:
        if self._has_lines:
            if self._is_first:
                text = text.removeprefix("\n")
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._is_first = False
        if self._is_text:
            self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._pieces.append(text)

    def end(self, types: Sequence[str], *, is_whole: bool) -> None:
        if not self._is_text:
            self._sink.arguments(_typed("".join(self._pieces), types))
        elif is_whole:
            self._sink.arguments('"')


def _typed(text: str, types: Sequence[str]) -> str:
    """JSON of a value of one of `types`, or of any type without them; a value of another type becomes a string."""
    given = text.strip()
    given = given if "string" in types else _WORDS.get(given, given)
    if is_json(given):
        kind = _FIRST.get(given[0], "number")
        is_whole_number = kind == "number" and not set(given) & set(".eE")
        if kind == "string" and "string" in types:
            pass  # the quotes are part of the value
        elif not types or kind in types or (is_whole_number and "integer" in types):
            return given
    return json.dumps(text, ensure_ascii=False)
