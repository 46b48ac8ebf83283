"""Llama 4's format of calls: a list of calls in Python's syntax, `[f(a=1), g()]`.

It begins the answer, or follows `<|python_start|>` anywhere. What is called is data: nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.lark import Lark
from kvtier.api.chat.part_sink import PartSink, is_name
from kvtier.api.chat.python_scan import PythonScan
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool, properties_of, types_of
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_BEGIN = "<|python_start|>"
_END = "<|python_end|>"
_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEY = re.compile(r"[^\s=()\[\]{},'\"]+")
_WRITES_CALLS = re.compile(r"""name\s*(?:[+~]\s*|-?\}\}\s*\{\{-?\s*)["']\(|name\s*-?\}\}\(|\[func_name1?\(""")
"""A template that writes a parenthesis after a name, or tells the model to."""


class PythonicFormat(ToolFormat):
    name = "llama4_pythonic"
    opening = "["
    closing = "]"
    between = ", "
    repeats_mark = False
    other_marks = (_BEGIN, _END)

    def is_in(self, template: str) -> bool:
        return "tool_calls" in template and _WRITES_CALLS.search(template) is not None

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        begun = ""
        while True:
            held = [begun + (yield from source.spaces())]
            if not begun and (yield from source.skip(_BEGIN)):
                held.append(_BEGIN + (yield from source.spaces()))
            if (yield from source.starts_with("[")) and (yield from _List(source, sink, held).read()):
                begun = ""
                continue
            sink.text("".join(held))
            begun = yield from source.until((_BEGIN,), sink.text)
            if not begun:
                return

    def call(self, lark: Lark, tool: Tool) -> str:
        """The parameters are in the order of their schema; there are no others."""
        schema = tool.parameters or {}
        required = schema.get("required")
        rest = first = ""
        for name, inner in reversed(properties_of(schema).items()):
            one = f"{lark.literal(name + '=')} {_value(lark, schema, inner)}"
            more = f"{lark.literal(', ')} {one}"
            is_required = isinstance(required, list) and name in required
            begins = f"{one} {rest}"
            first = begins if is_required else f"({begins} | {first})" if first else f"({begins})?"
            first = lark.rule(first)
            rest = lark.rule(f"{more} {rest}" if is_required else f"({more})? {rest}")
        return f"{lark.literal(tool.name)} {lark.literal('(')} {first} {lark.literal(')')}"

    def group(self, lark: Lark, calls: str) -> str:
        """With both marks or without: templates differ."""
        bare = lark.rule(super().group(lark, calls))
        return f"({lark.literal(_BEGIN)} {bare} {lark.literal(_END)} | {bare})"

    def other_text(self, tools: Sequence[Tool]) -> str:
        """Text that does not begin like a call, and has no mark in it."""
        begin = re.escape(_BEGIN)
        return rf"/(?s:.*)/ & ~/\s*\[(?s:.*)/ & ~/(?s:.*){begin}(?s:.*)/"


class _List:
    """Reads a list of calls. `held` has the text that may not be a call, and is emptied when the first one begins."""

    def __init__(self, source: TextSource, sink: PartSink, held: list[str]) -> None:
        self._source = source
        self._sink = sink
        self._held = held
        self._scan = PythonScan(source, sink.arguments)

    def read(self) -> Reading[bool]:
        """Whether the list is complete, and has calls only. After malformed text, what was held is all before it."""
        source, held = self._source, self._held
        held.append(source.take(1))
        while (yield from self._call()):
            held.append((yield from source.spaces()))
            is_more = yield from source.skip(",")
            if is_more:
                held.append("," + (yield from source.spaces()))
            if (yield from source.skip("]")):
                held.clear()
                spaces = yield from source.spaces()
                if not (yield from source.skip(_END)):
                    self._sink.text(spaces)
                return True
            if not is_more:
                break
        return False

    def _call(self) -> Reading[bool]:
        source, sink, held = self._source, self._sink, self._held
        held.append((yield from source.spaces()))
        word = yield from source.word(("(",))
        held.append(word)
        if not _NAME.fullmatch(word) or not is_name(word):
            return False
        held.append(source.take(1) + (yield from source.spaces()))
        if (yield from source.skip(")")):
            held.clear()
            sink.begin(word)
            sink.arguments("{}")
            return True
        key = yield from self._key()
        if not key:
            return False
        held.clear()
        sink.begin(word)
        lead = "{"
        while key:
            sink.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            lead = ", "
            if not (yield from self._scan.value()):
                return False
            is_more = (yield from self._scan.next()) == ","
            if is_more:
                source.take(1)
            if (yield from self._scan.next()) == ")":
                source.take(1)
                sink.arguments("}")
                return True
            if not is_more:
                return False
            key = yield from self._key()
        return False

    def _key(self) -> Reading[str]:
        """Read the name of a parameter and the sign after it; empty if there is none. What was taken is held."""
        word = yield from self._source.word(("=",))
        key = word.strip()
        self._held.append(word)
        if not _KEY.fullmatch(key) or not is_name(key):
            return ""
        self._held.append(self._source.take(1))
        return key


def _value(lark: Lark, schema: Mapping[str, object], inner: object) -> str:
    """A value of JSON, which is one of Python, too, but for its three words."""
    types = types_of(inner)
    has_values = isinstance(inner, dict) and bool({"enum", "const"} & set(inner))
    if types and set(types) <= {"boolean", "null"} and not has_values:
        words = {"boolean": ("True", "False"), "null": ("None",)}
        return f"({' | '.join(lark.literal(word) for kind in types for word in words[kind])})"
    return lark.value(schema, inner)
