"""Encodes the answers of Ollama's API, as bytes: one line of JSON per piece of a stream, or one object."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.chat.answer_readers import AnswerReaders
from kvtier.api.chat.parts import AnswerPart, CallArguments, CallBegin, ReasoningPart, TextPart
from kvtier.api.chat.tool_formats.object_call import is_json
from kvtier.api.generation import Usage, WholeAnswer
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, encode_items, joined
from kvtier.api.ollama.requests import LoadModel
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.errors import KvtierError

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "internal error: see the server's log"

_encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: Sequence[object] | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """An object of Ollama's API, plus `cached_tokens`, `retention` and `parted`. Durations are in nanoseconds."""

    model: str
    created_at: datetime
    response: str | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    logprobs: Sequence[SampledToken] | Sequence[object] | msgspec.Raw | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cached_tokens: dict[str, int] | UnsetType = UNSET
    retention: list[dict[str, object]] | UnsetType = UNSET
    parted: dict[str, object] | UnsetType = UNSET


@dataclass(slots=True)
class _OpenCall:
    """A tool call whose arguments are still arriving; no call is open if `begin` is None."""

    begin: CallBegin | None = None
    arguments: list[str] = field(default_factory=list)


class _OllamaEncoder(ABC):
    """The encoder that `/api/generate` and `/api/chat` share. `name` is the client's name for the model."""

    media_type = "application/x-ndjson"

    def __init__(self, name: str, request_id: str, form: AnswerForm = PLAIN) -> None:
        self._name = name
        self._request_id = request_id
        self._started_ns = time.monotonic_ns()
        self._readers = AnswerReaders(form, num_answers=1)
        self._call = _OpenCall()
        self._last: Line | None = None
        """The last line of a stream."""

    @abstractmethod
    def line(self, text: str, thinking: str = "", calls: Sequence[object] = ()) -> Line: ...

    def loaded(self, load: LoadModel) -> bytes:
        line = self.line("")
        line.done = True
        line.done_reason = load.done_reason
        return _encode(line)

    def begin(self, prompt_ends: Sequence[str]) -> None:
        self._readers.begin(prompt_ends)

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        found = [self._line_of(part) for part in self._readers.push(choice, piece)]
        if piece.completion is not None:
            found.append(self._line_of(None))
        lines = [line for line in found if line is not None]
        if logprobs and not lines:
            lines = [self.line("")]  # the text is held back: it may be the start of a marker
        if logprobs:
            lines[0].logprobs = logprobs
        if piece.completion is not None:  # sent by `end`, with the usage
            self._last = self._ended(self.line(""), piece.completion, prompt_tokens)
        return b"".join([_encode(line) + b"\n" for line in lines])

    def end(self, usage: Usage) -> bytes:
        if self._last is None:
            return b""
        self._last.retention = usage.retained
        self._last.parted = usage.parted
        return _encode(self._last) + b"\n"

    def error(self, error: Exception) -> bytes:
        if isinstance(error, KvtierError):
            return error_body(str(error)) + b"\n"
        logger.error("request %s failed", self._request_id, exc_info=error)
        return error_body(INTERNAL_ERROR) + b"\n"

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        return (encode_items(tokens),)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        [answer] = answers
        assert answer.completion is not None
        parts = self._readers.whole(0, answer)
        calls, texts = [], [parts.text]
        for number, call in enumerate(parts.calls):
            shaped = _call(number, call.call_id, call.name, call.arguments)
            calls += [] if shaped is None else [shaped]
            texts += [] if shaped is not None else [call.arguments]
        line = self.line("".join(texts), parts.reasoning, calls)
        if answer.logprobs:
            line.logprobs = joined(answer.logprobs)
        line.retention = usage.retained
        line.parted = usage.parted
        return _encode(self._ended(line, answer.completion, usage.prompt_tokens))

    def incomplete(self, reason: str | None) -> str:
        return f"the engine stopped before the answer was complete ({reason})"

    def _line_of(self, part: AnswerPart | None) -> Line | None:
        """The line for a part, or, with None, for the end of an answer. A tool call is sent once it is complete."""
        if isinstance(part, CallArguments):
            self._call.arguments.append(part.text)
            return None
        ended, self._call = self._call, _OpenCall(part if isinstance(part, CallBegin) else None)
        line = self.line(
            part.text if isinstance(part, TextPart) else "",
            part.text if isinstance(part, ReasoningPart) else "",
        )
        if ended.begin is None:
            return line if isinstance(part, (TextPart, ReasoningPart)) else None
        arguments = "".join(ended.arguments)
        call = _call(ended.begin.number, ended.begin.call_id, ended.begin.name, arguments)
        text = part.text if isinstance(part, TextPart) else ""
        return self.line(text, "", [call]) if call is not None else self.line(arguments + text)

    def _ended(self, line: Line, completion: Completion, prompt_tokens: int) -> Line:
        num_tokens = len(completion.token_ids)
        line.done = True
        line.done_reason = completion.finish_reason or UNSET
        line.total_duration = time.monotonic_ns() - self._started_ns
        line.load_duration = 0
        line.prompt_eval_count = prompt_tokens
        line.prompt_eval_duration = nanoseconds(completion.ttft_s)
        line.eval_count = num_tokens
        line.eval_duration = nanoseconds(completion.time_per_output_token_s * max(0, num_tokens - 1))
        line.cached_tokens = completion.cached_tokens
        return line


class GenerateEncoder(_OllamaEncoder):
    def line(self, text: str, thinking: str = "", calls: Sequence[object] = ()) -> Line:
        line = Line(model=self._name, created_at=datetime.now(UTC), response=text)
        if thinking:
            line.thinking = thinking
        return line


class ChatEncoder(_OllamaEncoder):
    def line(self, text: str, thinking: str = "", calls: Sequence[object] = ()) -> Line:
        message = Message("assistant", text, thinking or UNSET, calls or UNSET)
        return Line(model=self._name, created_at=datetime.now(UTC), message=message)


def _call(number: int, call_id: str, name: str, arguments: str) -> dict[str, object] | None:
    """A call with its arguments as the model wrote them; None if they are not a JSON object, since they were cut."""
    if not arguments.lstrip().startswith("{") or not is_json(arguments):
        return None
    function = {"index": number, "name": name, "arguments": msgspec.Raw(arguments.encode())}
    return {"id": call_id, "function": function}


def error_body(sentence: str) -> bytes:
    return _encode({"error": sentence})


def nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by the duration, even for an answer of one token."""
    return max(1, round(seconds * 1e9))
