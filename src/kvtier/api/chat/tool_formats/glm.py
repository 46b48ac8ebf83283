"""GLM's format of calls: since GLM-4.5 an element for each argument, before that a name and a JSON object."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.json_scan import JsonScan
from kvtier.api.chat.lark import Lark
from kvtier.api.chat.part_sink import PartSink, is_name
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats.element_call import ElementCall, Elements
from kvtier.api.chat.tool_formats.hermes import BEGIN, END
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_KEY = "<arg_key>"
_ELEMENTS = Elements(_KEY, "</arg_key>", "<arg_value>", "</arg_value>", has_lines=False)
_ASSISTANT = "<|assistant|>"
_LINE_END = "\n"


class GlmFormat(ToolFormat):
    """GLM-4.5 and later."""

    name = "glm45"
    mark = BEGIN
    closing = END
    between = "\n"
    other_marks = (END, _KEY, "</arg_key>", "<arg_value>", "</arg_value>")
    needs_types = True

    def is_in(self, template: str) -> bool:
        return _KEY in template and BEGIN in template

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        while (yield from source.until((BEGIN,), sink.text)):
            yield from self._call(source, sink, form)

    def _call(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        spaces = yield from source.spaces()
        word = yield from source.word(("\n", _KEY, END))
        name = word.strip()
        after = yield from source.spaces()
        has_arguments = (yield from source.starts_with(_KEY)) or (yield from source.starts_with(END))
        if not (is_name(name) and has_arguments):
            sink.text(BEGIN + spaces + word + after)
            return
        sink.begin(name)
        spaces = yield from ElementCall(source, sink, _ELEMENTS, form.parameter_types.get(name, {})).read()
        if not (yield from source.skip(END)):
            sink.text(spaces)

    def call(self, lark: Lark, tool: Tool) -> str:
        parameters = lark.elements(tool, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
        return f"{lark.literal(tool.name + _LINE_END)} {parameters}"


class Glm4Format(ToolFormat):
    """The tool's name alone on a line, then a JSON object. There is no marker, so the name must be that of a tool."""

    name = "glm4"
    between = "\n"
    other_marks = (_ASSISTANT,)

    def is_in(self, template: str) -> bool:
        return "[gMASK]" in template and "<|observation|>" in template

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        held: list[str] = []
        while True:
            held.append((yield from source.spaces()))
            if (yield from source.skip(_ASSISTANT)):
                held.append(_ASSISTANT + (yield from source.spaces()))
            if not (yield from self._call(source, sink, form, held)):
                break
        sink.text("".join(held))
        yield from source.rest(sink.text)

    def _call(self, source: TextSource, sink: PartSink, form: AnswerForm, held: list[str]) -> Reading[bool]:
        for name in form.tool_names:
            if (yield from source.skip(name + "\n")):
                break
        else:
            return False
        if not (yield from source.starts_with("{")):
            held.append(name + "\n")
            return False
        held.clear()
        sink.begin(name)
        return (yield from JsonScan(source, sink.arguments).value())

    def call(self, lark: Lark, tool: Tool) -> str:
        return f"{lark.literal(tool.name + _LINE_END)} {lark.json(tool.parameters)}"

    def other_text(self, tools: Sequence[Tool]) -> str:
        names = "|".join(re.escape(tool.name) for tool in tools)
        return rf"/(?s:.*)/ & ~/\s*({names})\n(?s:.*)/"
