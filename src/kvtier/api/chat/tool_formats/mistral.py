"""Mistral's formats of calls, after `[TOOL_CALLS]`: a JSON list, or a name, `[ARGS]` and a JSON object."""

from __future__ import annotations

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.json_scan import JsonScan
from kvtier.api.chat.lark import Lark
from kvtier.api.chat.part_sink import PartSink, is_name
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats.object_call import ObjectCall
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_MARK = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"


class MistralFormat(ToolFormat):
    """Reads both forms; its grammar writes the list. Templates refuse ids of another length."""

    name = "mistral"
    mark = _MARK
    opening = " ["
    closing = "]"
    between = ", "
    repeats_mark = False
    other_marks = (_ARGUMENTS, _ID)
    id_characters = 9

    def is_in(self, template: str) -> bool:
        return _MARK in template

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        while (yield from source.until((_MARK,), sink.text)):
            held = [_MARK, (yield from source.spaces())]
            first = yield from source.peek()
            if first == "[":
                yield from self._list(source, sink, held)
            elif first == "{":
                yield from ObjectCall(source, sink, held).read()
            else:
                yield from self._named(source, sink, held)
            sink.text("".join(held))

    def _list(self, source: TextSource, sink: PartSink, held: list[str]) -> Reading[None]:
        held.append(source.take(1))
        while (yield from ObjectCall(source, sink, held).read()):
            held.append((yield from source.spaces()))
            if (yield from source.skip("]")):
                held.clear()
                return
            if not (yield from source.skip(",")):
                return
            held.append(",")

    def _named(self, source: TextSource, sink: PartSink, held: list[str]) -> Reading[None]:
        name = yield from source.word((_ARGUMENTS, _ID, "{"))
        held.append(name)
        if not is_name(name.strip()):
            return
        if (yield from source.skip(_ID)):
            held.append(_ID + (yield from source.word((_ARGUMENTS, "{"))))
        if (yield from source.skip(_ARGUMENTS)):
            held.append(_ARGUMENTS + (yield from source.spaces()))
        if (yield from source.starts_with("{")):
            held.clear()
            sink.begin(name.strip())
            yield from JsonScan(source, sink.arguments).value()

    def call(self, lark: Lark, tool: Tool) -> str:
        return lark.named_object(tool, "arguments")


class MistralArgsFormat(MistralFormat):
    """The form of newer templates, with a marker before each call."""

    name = "mistral_args"
    opening = closing = between = ""
    repeats_mark = True

    def is_in(self, template: str) -> bool:
        return _MARK in template and _ARGUMENTS in template

    def call(self, lark: Lark, tool: Tool) -> str:
        return f"{lark.literal(tool.name)} {lark.literal(_ARGUMENTS)} {lark.json(tool.parameters)}"
