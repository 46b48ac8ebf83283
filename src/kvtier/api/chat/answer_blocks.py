"""An answer as a sequence of blocks (reasoning, text, tool calls), for APIs with items or content blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.answer_reader import AnswerReader
from kvtier.api.chat.parts import AnswerPart, CallArguments, CallBegin, ReasoningPart, TextPart
from kvtier.api.chat.tool import FUNCTION

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """A contiguous part of an answer. For a tool call, `call` has its name and id, and the text is its arguments.

    `tool_kind` is the kind of the called tool.
    """

    index: int
    kind: BlockKind
    call: CallBegin | None = None
    tool_kind: str = FUNCTION
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class BlockBegins:
    block: AnswerBlock


@dataclass(frozen=True, slots=True)
class BlockGrows:
    block: AnswerBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnds:
    block: AnswerBlock


BlockEvent = BlockBegins | BlockGrows | BlockEnds


class AnswerBlocks:
    """White space around reasoning or a call makes no block of its own; an empty answer has one empty text block."""

    def __init__(self, form: AnswerForm, prompt_end: str = "") -> None:
        self.blocks: list[AnswerBlock] = []
        self.num_reasoning_tokens = 0
        self._tool_kinds = form.call_kinds
        self._reader = AnswerReader(form, prompt_end)
        self._open: AnswerBlock | None = None
        self._held = ""

    @property
    def num_calls(self) -> int:
        return sum(block.kind == "call" for block in self.blocks)

    @property
    def is_in_text(self) -> bool:
        """Whether the next characters are text, as far as is known."""
        return not self._reader.is_thinking and (self._open is None or self._open.kind == "text")

    def push(self, text: str, num_tokens: int = 0) -> list[BlockEvent]:
        """Add the text of the next `num_tokens` tokens."""
        was_thinking = self._reader.is_thinking
        events = self._take(self._reader.push(text))
        if was_thinking or self._reader.is_thinking:
            self.num_reasoning_tokens += num_tokens
        return events

    def finish(self) -> list[BlockEvent]:
        """No more text comes."""
        events = self._take(self._reader.finish())
        if not self.blocks:
            events += self._begin("text")
            events += self._grow(self._held)
        return events + self._end()

    @property
    def _is_reasoning(self) -> bool:
        return self._open is not None and self._open.kind == "reasoning"

    def _take(self, parts: Sequence[AnswerPart]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for part in parts:
            if isinstance(part, TextPart):
                events += self._take_text(part.text)
            elif isinstance(part, ReasoningPart):
                if not self._is_reasoning:
                    events += self._begin("reasoning")
                events += self._grow(part.text)
            elif isinstance(part, CallBegin):
                events += self._begin("call", part)
            else:
                assert isinstance(part, CallArguments)
                events += self._grow(part.text)
        return events

    def _take_text(self, text: str) -> list[BlockEvent]:
        if self._open is not None and self._open.kind == "text":
            return self._grow(text)
        self._held += text
        if not self._held or self._held.isspace():
            return []
        held = self._held
        return self._begin("text") + self._grow(held)

    def _begin(self, kind: BlockKind, call: CallBegin | None = None) -> list[BlockEvent]:
        events = self._end()
        if kind != "text":
            self._held = ""
        tool_kind = FUNCTION if call is None else self._tool_kinds.get(call.name, FUNCTION)
        self._open = AnswerBlock(len(self.blocks), kind, call, tool_kind)
        self.blocks.append(self._open)
        return [*events, BlockBegins(self._open)]

    def _grow(self, text: str) -> list[BlockEvent]:
        assert self._open is not None
        self._held = ""
        if not text:
            return []
        self._open.texts.append(text)
        return [BlockGrows(self._open, text)]

    def _end(self) -> list[BlockEvent]:
        ended, self._open = self._open, None
        return [] if ended is None else [BlockEnds(ended)]
