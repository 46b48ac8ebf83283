"""Llama 3's format of calls: the whole answer is one or more JSON objects, with or without a special token before."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.lark import Lark
from kvtier.api.chat.part_sink import PartSink
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats.object_call import ObjectCall
from kvtier.api.chat.tool_formats.tool_format import ToolFormat

_TAG = "<|python_tag|>"


class LlamaFormat(ToolFormat):
    name = "llama3_json"
    between = "; "
    other_marks = (_TAG,)

    def is_in(self, template: str) -> bool:
        return '"parameters":' in template and ("ipython" in template or _TAG in template)

    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        held: list[str] = []
        while True:
            held.append((yield from source.spaces()))
            if (yield from source.skip(_TAG)):
                held.append(_TAG + (yield from source.spaces()))
            if not (yield from source.starts_with("{")):
                break
            if not (yield from ObjectCall(source, sink, held, needs_arguments=True).read()):
                break
            held.append((yield from source.spaces()))
            if (yield from source.skip(";")):
                held.append(";")
        sink.text("".join(held))
        yield from source.rest(sink.text)

    def call(self, lark: Lark, tool: Tool) -> str:
        return lark.named_object(tool, "parameters")

    def other_text(self, tools: Sequence[Tool]) -> str:
        """Text that does not begin like a call: an answer that does is always a call."""
        return r"/([^{\s](.|\n)*)?/"
