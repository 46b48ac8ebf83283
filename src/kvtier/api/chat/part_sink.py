"""Collects the parts of an answer that readers find in its text."""

from __future__ import annotations

import secrets
import string

from kvtier.api.chat.parts import AnswerPart, CallArguments, CallBegin, ReasoningPart, TextPart

_CHARACTERS = string.ascii_letters + string.digits
_ID_CHARACTERS = 24
MAX_NAME_CHARACTERS = 256


class PartSink:
    """White space between text and calls is dropped: templates write it themselves, so in a client's next request it
    would appear twice. With `trims`, it is held back until the next text or call arrives.

    Without `allows_several`, calls after the first are dropped, as in vLLM. A call may have any name: the client also
    gets calls of tools that were not offered, as from vLLM, and can tell the model.
    """

    def __init__(self, *, trims: bool, allows_several: bool = True, id_characters: int = 0) -> None:
        self.num_calls = 0
        self._parts: list[AnswerPart] = []
        self._trims = trims
        self._allows_several = allows_several
        self._id_characters = id_characters
        self._spaces: list[str] = []
        self._arguments: list[str] = []
        self._is_after_mark = False
        self._is_dropping = False

    def taken(self) -> list[AnswerPart]:
        """The parts since the previous call of this method."""
        self._join_arguments()
        taken, self._parts = self._parts, []
        return taken

    def note_mark(self) -> None:
        """Drop the white space that follows."""
        self._is_after_mark = True
        self._spaces.clear()

    def text(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
            self._is_after_mark = not text
        self._add(text, TextPart)

    def reasoning(self, text: str) -> None:
        if self._is_after_mark:
            text = text.lstrip()
            self._is_after_mark = not text
        self._add(text, ReasoningPart, trims=True)

    def begin(self, name: str) -> None:
        """Begin a call. Its arguments follow, until text or another call."""
        self.note_mark()
        self._join_arguments()
        self._is_dropping = bool(self.num_calls) and not self._allows_several
        if not self._is_dropping:
            self._parts.append(CallBegin(self.num_calls, self._new_id(), name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the newest call."""
        if text and not self._is_dropping:
            self._arguments.append(text)

    def finish(self) -> None:
        if not self.num_calls and self._spaces:
            self._parts.append(TextPart("".join(self._spaces)))
        self._spaces.clear()

    def _add(self, text: str, kind: type[TextPart] | type[ReasoningPart], *, trims: bool = False) -> None:
        if not text:
            return
        self._join_arguments()
        if not (self._trims or trims):
            self._parts.append(kind(text))
            return
        rest = text.rstrip()
        if rest:
            self._parts.append(kind("".join([*self._spaces, rest])))
            self._spaces.clear()
        if len(rest) < len(text):
            self._spaces.append(text[len(rest) :])

    def _join_arguments(self) -> None:
        """Make one part of all arguments that have arrived."""
        if self._arguments:
            self._parts.append(CallArguments(self.num_calls - 1, "".join(self._arguments)))
            self._arguments.clear()

    def _new_id(self) -> str:
        if self._id_characters:
            return "".join(secrets.choice(_CHARACTERS) for _ in range(self._id_characters))
        return "call_" + secrets.token_hex(_ID_CHARACTERS // 2)


def is_name(name: str) -> bool:
    """Whether a tool may have this name: printable and not too long."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
