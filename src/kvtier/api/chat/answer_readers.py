"""A reader for each answer of one request, and a count of the tokens of reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.api.answer_form import AnswerForm
from kvtier.api.chat.answer_reader import AnswerReader, joined_parts
from kvtier.api.chat.parts import AnswerPart, CallArguments, CallBegin, WholeParts
from kvtier.api.generation import WholeAnswer
from kvtier.engine.answer import Completion, StreamPiece


class AnswerReaders:
    """Readers by `choice`, which numbers all answers of the request; each prompt has `num_answers`."""

    def __init__(self, form: AnswerForm, num_answers: int) -> None:
        self.num_reasoning_tokens = 0
        self._form = form
        self._num_answers = num_answers
        self._prompt_ends: Sequence[str] = ()
        self._readers: dict[int, AnswerReader] = {}
        self._arguments: dict[int, list[str]] = {}
        """Of the last call of each answer, in pieces."""

    @property
    def splits_reasoning(self) -> bool:
        return self._form.splits_reasoning

    def begin(self, prompt_ends: Sequence[str]) -> None:
        self._prompt_ends = prompt_ends

    def push(self, choice: int, piece: StreamPiece) -> list[AnswerPart]:
        """The parts that a piece completes; the last piece of an answer completes the rest."""
        reader = self._reader(choice)
        was_thinking, num_thought = reader.is_thinking, reader.reasoning_end
        parts = reader.push(piece.text)
        if was_thinking or reader.is_thinking or reader.reasoning_end > num_thought:
            self.num_reasoning_tokens += len(piece.token_ids)
        if piece.completion is not None:
            parts += reader.finish()
        self._note(choice, parts)
        return parts

    def whole(self, choice: int, answer: WholeAnswer) -> WholeParts:
        """The parts of a complete answer, read in one go, which is fast for any length."""
        reader = self._reader(choice)
        found = [*reader.push(answer.text), *reader.finish()]
        self._note(choice, found)
        parts = joined_parts(found)
        num_characters = 0
        for text, num_tokens in zip(answer.texts, answer.num_tokens, strict=True):
            if num_characters >= reader.reasoning_end:
                break
            num_characters += len(text)
            self.num_reasoning_tokens += num_tokens
        return parts

    def num_calls(self, choice: int) -> int:
        return self._reader(choice).num_calls

    def finish_reason(self, choice: int, completion: Completion | None) -> str | None:
        """The finish reason in OpenAI's API, where an answer that ends with tool calls has a reason of its own.

        One that a stop string ended within a call does not end with it.
        """
        if completion is None:
            return None
        reason = completion.finish_reason
        if reason != "stop" or not self._reader(choice).num_calls:
            return reason
        return "stop" if completion.stop is not None and self._is_cut(choice) else "tool_calls"

    def _note(self, choice: int, parts: Sequence[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, CallBegin):
                self._arguments[choice] = []
            elif isinstance(part, CallArguments):
                self._arguments[choice].append(part.text)

    def _is_cut(self, choice: int) -> bool:
        """Whether the arguments of the last call are incomplete."""
        try:
            msgspec.json.decode("".join(self._arguments.get(choice, ())))
        except (msgspec.DecodeError, RecursionError):
            return True
        return False

    def _reader(self, choice: int) -> AnswerReader:
        reader = self._readers.get(choice)
        if reader is None:
            number = choice // self._num_answers
            prompt_end = self._prompt_ends[number] if number < len(self._prompt_ends) else ""
            reader = self._readers[choice] = AnswerReader(self._form, prompt_end)
        return reader
