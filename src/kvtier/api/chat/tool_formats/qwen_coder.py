"""Qwen3-Coder's format of calls: `<function=NAME>`, and an element for each parameter."""

from __future__ import annotations

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.lark import Lark
from kvtier.api.chat.part_sink import PartSink, is_name
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats.element_call import ElementCall, Elements
from kvtier.api.chat.tool_formats.hermes import BEGIN, END, read_object
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_ELEMENTS = Elements("<parameter=", ">", "", "</parameter>", has_lines=True, call_ends=("\n" + _FUNCTION_END, END))


class QwenCoderFormat(ToolFormat):
    name = "qwen3_coder"
    mark = BEGIN
    opening = "\n"
    closing = "\n" + END
    between = "\n"
    other_marks = (END,)
    needs_types = True

    def is_in(self, template: str) -> bool:
        return _FUNCTION in template and BEGIN in template

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        """The model sometimes leaves `<tool_call>` out, or writes JSON after it."""
        while mark := (yield from source.until((BEGIN, _FUNCTION), sink.text)):
            held = [mark]
            if mark == BEGIN:
                held.append((yield from source.spaces()))
                if (yield from source.starts_with("{")):
                    yield from read_object(source, sink, held)
                    continue
                if not (yield from source.skip(_FUNCTION)):
                    sink.text("".join(held))
                    continue
                held.append(_FUNCTION)
            yield from self._function(source, sink, form, held)

    def _function(self, source: TextSource, sink: PartSink, form: AnswerForm, held: list[str]) -> Reading[None]:
        """Read a call after `<function=`."""
        name = yield from source.word((">",))
        if not is_name(name.strip()):
            sink.text("".join([*held, name]))
            return
        source.take(1)
        sink.begin(name.strip())
        types = form.parameter_types.get(name.strip(), {})
        spaces = yield from ElementCall(source, sink, _ELEMENTS, types).read()
        if (yield from source.skip(_FUNCTION_END)):
            spaces = yield from source.spaces()
            if (yield from source.skip(END)):
                return
        sink.text(spaces)

    def call(self, lark: Lark, tool: Tool) -> str:
        parameters = lark.elements(tool, "<parameter={}>\n", "\n</parameter>\n")
        begin = lark.literal(f"{_FUNCTION}{tool.name}>\n")
        return f"{begin} {parameters} {lark.literal(_FUNCTION_END)}"
