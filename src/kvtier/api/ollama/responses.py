"""The shapes of what Ollama's API answers: lines of JSON as an answer grows, or one object. All are bytes."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.api.generation import Usage, WholeAnswer
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, encode_items, joined
from kvtier.api.ollama.requests import LoadModel
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.errors import KvtierError

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "internal error: the server's log says more"

_encode = msgspec.json.Encoder().encode


class Message(msgspec.Struct):
    """`thinking` and `tool_calls` are only vLLM's."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: Sequence[object] | UnsetType = UNSET


class Line(msgspec.Struct, kw_only=True):
    """One object of Ollama's; durations are in nanoseconds. `cached_tokens` by tier is ours."""

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


class _OllamaShape(ABC):
    """What `/api/generate` and `/api/chat` share. `name` is what the client calls the model."""

    media_type = "application/x-ndjson"

    def __init__(self, name: str, request_id: str) -> None:
        self._name = name
        self._request_id = request_id
        self._started_ns = time.monotonic_ns()

    @abstractmethod
    def line(self, text: str) -> Line: ...

    def loaded(self, load: LoadModel) -> bytes:
        line = self.line("")
        line.done = True
        line.done_reason = load.done_reason
        return _encode(line)

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        lines = b""
        if piece.text or logprobs:
            line = self.line(piece.text)
            if logprobs:
                line.logprobs = logprobs
            lines = _encode(line) + b"\n"
        if piece.completion is not None:
            lines += _encode(self._ended(self.line(""), piece.completion, prompt_tokens)) + b"\n"
        return lines

    def end(self, usage: Usage) -> bytes:
        return b""

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
        line = self.line(answer.text)
        if answer.logprobs:
            line.logprobs = joined(answer.logprobs)
        return _encode(self._ended(line, answer.completion, usage.prompt_tokens))

    def broken_off(self, reason: str | None) -> str:
        return f"the engine gave the answer up ({reason})"

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


class GenerateShape(_OllamaShape):
    def line(self, text: str) -> Line:
        return Line(model=self._name, created_at=datetime.now(UTC), response=text)


class ChatShape(_OllamaShape):
    def line(self, text: str) -> Line:
        return Line(model=self._name, created_at=datetime.now(UTC), message=Message("assistant", text))


def error_body(sentence: str) -> bytes:
    return _encode({"error": sentence})


def nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it, also for an answer of one token."""
    return max(1, round(seconds * 1e9))
