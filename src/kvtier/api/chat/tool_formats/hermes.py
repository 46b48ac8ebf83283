"""The format of Hermes, Qwen2.5 and Qwen3: a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.lark import Lark
from kvtier.api.chat.part_sink import PartSink
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats.object_call import ObjectCall
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesFormat(ToolFormat):
    name = "hermes"
    mark = BEGIN
    opening = "\n"
    closing = "\n" + END
    between = "\n"
    other_marks = (END,)

    def is_in(self, template: str) -> bool:
        return BEGIN in template

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        while (yield from source.until((BEGIN,), sink.text)):
            yield from read_object(source, sink, [BEGIN])

    def call(self, lark: Lark, tool: Tool) -> str:
        return lark.named_object(tool, "arguments")


def read_object(source: TextSource, sink: PartSink, held: list[str]) -> Reading[None]:
    """Read a call after its marker, which is in `held` and becomes text if no call follows."""
    if (yield from ObjectCall(source, sink, held).read()):
        held.append((yield from source.spaces()))
        if (yield from source.skip(END)):
            held.clear()
    sink.text("".join(held))
