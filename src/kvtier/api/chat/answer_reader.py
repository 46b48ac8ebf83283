"""Splits the text of one answer into parts while it arrives."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.part_sink import PartSink
from kvtier.api.chat.parts import AnswerPart, CallArguments, CallBegin, ReasoningPart, TextPart, WholeCall, WholeParts
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool_formats import TOOL_FORMATS
from kvtier.engine.thinking_marks import THOUGHT_BEGIN, THOUGHT_END, ends_in_thought


class AnswerReader:
    """The joined parts do not depend on how the text was cut. A possible start of a marker is held back.

    A call begins once the tool's name and the start of its arguments have arrived; until then it may turn out to be
    text. A call that is cut or malformed after that keeps the arguments so far, and the rest is text.
    """

    def __init__(self, form: AnswerForm, prompt_end: str = "") -> None:
        """`prompt_end` is the last text of the rendered prompt: some templates begin the model's thinking there."""
        self._form = form
        self._format = TOOL_FORMATS.get(form.tool_format)
        self._source = TextSource()
        self._sink = PartSink(
            trims=self._format is not None,
            allows_several=form.allows_several,
            id_characters=0 if self._format is None else self._format.id_characters,
        )
        self.reasoning_end = 0
        """Where the reasoning ends so far: characters from the start of the answer, markers included."""
        self._is_thinking = form.splits_reasoning and ends_in_thought(prompt_end)
        self._is_plain = self._format is None and not form.splits_reasoning
        self._reading = self._read()

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def is_thinking(self) -> bool:
        return self._is_thinking

    def push(self, text: str) -> list[AnswerPart]:
        if self._is_plain:
            return [TextPart(text)] if text else []
        self._source.add(text)
        self._resume()
        return self._sink.taken()

    def finish(self) -> list[AnswerPart]:
        """No more text comes."""
        self._source.end()
        self._resume()
        self._sink.finish()
        return self._sink.taken()

    def _resume(self) -> None:
        next(self._reading, None)

    def _read(self) -> Reading[None]:
        if self._form.splits_reasoning:
            yield from self._thought()
        if self._format is None:
            yield from self._source.rest(self._sink.text)
        else:
            yield from self._format.read(self._source, self._sink, self._form)

    def _thought(self) -> Reading[None]:
        source, sink = self._source, self._sink
        if not self._is_thinking:
            spaces = yield from source.spaces()
            self._is_thinking = yield from source.skip(THOUGHT_BEGIN)
            if not self._is_thinking:
                sink.text(spaces)
                return
        sink.note_mark()
        yield from source.until((THOUGHT_END,), self._think)
        sink.note_mark()
        self.reasoning_end = source.num_taken
        self._is_thinking = False

    def _think(self, text: str) -> None:
        self.reasoning_end = self._source.num_taken
        if self._form.shows_reasoning:
            self._sink.reasoning(text)


def joined_parts(parts: Iterable[AnswerPart]) -> WholeParts:
    texts, reasoning = [], []
    calls: list[tuple[CallBegin, list[str]]] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, ReasoningPart):
            reasoning.append(part.text)
        elif isinstance(part, CallBegin):
            calls.append((part, []))
        else:
            assert isinstance(part, CallArguments)
            calls[part.number][1].append(part.text)
    whole = tuple(WholeCall(begin.call_id, begin.name, "".join(arguments)) for begin, arguments in calls)
    return WholeParts("".join(texts), "".join(reasoning), whole)
