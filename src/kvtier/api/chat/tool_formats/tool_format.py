"""What a way to write calls has: how it is known, how it is read, and how a grammar writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.lark import ANY_TEXT, Lark
from kvtier.api.chat.part_sink import PartSink
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool


class ToolFormat(ABC):
    """A call is `mark`, `opening`, the call itself and `closing`; `between` is between two calls.

    Where `repeats_mark` is false, one mark and one pair of opening and closing stand around all calls.
    """

    name: str
    mark: str = ""
    opening: str = ""
    closing: str = ""
    between: str = ""
    repeats_mark = True
    other_marks: tuple[str, ...] = ()
    """Further texts that some tokenizers have a special token for."""
    id_characters = 0
    """Of the id of a call, where templates insist on a number of them."""
    needs_types = False
    """Whether values are written without their type."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must not be left out of an answer as special tokens."""
        return (self.mark, *self.other_marks) if self.mark else self.other_marks

    @abstractmethod
    def is_in(self, template: str) -> bool:
        """Whether this chat template writes calls so."""

    @abstractmethod
    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        """Read an answer to its end. Whatever is no call is text."""

    @abstractmethod
    def call(self, lark: Lark, tool: Tool) -> str:
        """The call itself, of this tool, in a grammar."""

    def other_text(self, tools: Sequence[Tool]) -> str:
        """The pattern, in a grammar, of an answer that is no call, of a format without a mark."""
        return ANY_TEXT
