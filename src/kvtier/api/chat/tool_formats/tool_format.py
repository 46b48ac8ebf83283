"""The interface of a format of tool calls: how it is recognised, how it is read, and its grammar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.lark import ANY_TEXT, Lark
from kvtier.api.chat.part_sink import PartSink
from kvtier.api.chat.text_source import Reading, TextSource
from kvtier.api.chat.tool import Tool


class ToolFormat(ABC):
    """A call is `mark`, `opening`, the call itself and `closing`; `between` separates two calls.

    If `repeats_mark` is false, all calls share one mark, one opening and one closing.
    """

    name: str
    mark: str = ""
    opening: str = ""
    closing: str = ""
    between: str = ""
    repeats_mark = True
    other_marks: tuple[str, ...] = ()
    """Further texts for which some tokenizers have a special token."""
    id_characters = 0
    """The length of call ids, if templates insist on one; otherwise 0."""
    needs_types = False
    """Whether values are written without a type, so that the reader needs the parameters' types."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must stay in an answer even if they are special tokens."""
        return (self.mark, *self.other_marks) if self.mark else self.other_marks

    @abstractmethod
    def is_in(self, template: str) -> bool:
        """Whether this chat template uses the format."""

    @abstractmethod
    def read(self, source: TextSource, sink: PartSink, form: AnswerForm) -> Reading[None]:
        """Read an answer to its end. All that is not a call is text."""

    @abstractmethod
    def call(self, lark: Lark, tool: Tool) -> str:
        """The grammar of a call of this tool, without mark, opening and closing."""

    def group(self, lark: Lark, calls: str) -> str:
        """The grammar of what follows a mark, around the grammar of its calls."""
        return f"{lark.literal(self.opening)} {calls} {lark.literal(self.closing)}"

    def other_text(self, tools: Sequence[Tool]) -> str:
        """The grammar's pattern for an answer without calls, in a format without a mark."""
        return ANY_TEXT
