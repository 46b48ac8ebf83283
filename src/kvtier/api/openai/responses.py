"""The shapes of what OpenAI's API answers: chunks of a stream, whole answers, usage, models, errors. All are bytes.

A stream has thousands of chunks per second: what is equal in all chunks of an answer is encoded once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvtier.api.http_error import HttpError
from kvtier.engine.process.messages import End, LikelyToken, Piece, TokenLogprobs

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_LEAST_LOGPROB = -9999.0
"""What OpenAI says of a token that cannot come: JSON has no infinity."""

_MAX_SENTENCE_CHARACTERS = 1000


# --- what is common ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of an answer, and a whole one, begins with. `model` is the name that the client used."""

    id: str
    model: str
    system_fingerprint: str | None
    created: int = field(default_factory=lambda: int(time.time()))


class _CachedTokens(msgspec.Struct):
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class _UsageShape(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens


@dataclass(slots=True)
class Usage:
    """The tokens of all prompts and answers of one request. A prompt counts once, however many answers it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)

    def add_prompt(self, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens

    def add_answer(self, index: int, prompt_tokens: int, end: End) -> None:
        """Answer `index` of a prompt is complete. What was cached is taken from the first one."""
        self.completion_tokens += end.output_tokens
        if index:
            return
        left = prompt_tokens
        for tier, count in end.cached_tokens.items():
            counted = min(count, left)
            left -= counted
            self.cached_tokens[tier] = self.cached_tokens.get(tier, 0) + counted

    def shape(self) -> _UsageShape:
        return _UsageShape(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            _CachedTokens(sum(self.cached_tokens.values()), self.cached_tokens),
        )


class Shape(Protocol):
    """How the answers to one request look. `choice` counts through all answers of all prompts."""

    def chunk(self, choice: int, piece: Piece) -> bytes:
        """Events of a stream for what came; empty if there is nothing to say yet."""

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The body of an answer that is not streamed, from all pieces of each choice."""


class _Chunks:
    """Server-sent events of one answer, of which only the choice differs."""

    def __init__(self, heading: Heading, kind: str, includes_usage: bool) -> None:
        head = {
            "id": heading.id,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.system_fingerprint,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"

    def of(self, choice: msgspec.Struct) -> bytes:
        return self._head + _encode(choice) + self._tail

    def of_usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage.shape()) + b"}\n\n"


def _whole(heading: Heading, kind: str, choices: list[msgspec.Struct], usage: Usage) -> bytes:
    return _encode(
        {
            "id": heading.id,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.system_fingerprint,
            "choices": choices,
            "usage": usage.shape(),
        }
    )


def _finish_reason(pieces: Sequence[Piece]) -> str | None:
    end = pieces[-1].end if pieces else None
    return None if end is None else end.finish_reason


def _all_logprobs(pieces: Sequence[Piece]) -> list[TokenLogprobs] | None:
    if all(piece.logprobs is None for piece in pieces):
        return None
    return [one for piece in pieces for one in piece.logprobs or ()]


# --- chat -------------------------------------------------------------------------------------------------------------


class _ChatLikely(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float


class _ChatToken(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[_ChatLikely]


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatToken]
    refusal: None = None


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class _ChatChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _ChatLogprobs | None = None
    finish_reason: str | None = None


class _ChatMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(msgspec.Struct):
    index: int
    message: _ChatMessage
    logprobs: _ChatLogprobs | None
    finish_reason: str | None


class ChatShape:
    def __init__(self, heading: Heading, includes_usage: bool) -> None:
        self._heading = heading
        self._chunks = _Chunks(heading, "chat.completion.chunk", includes_usage)
        self._begun: set[int] = set()

    def chunk(self, choice: int, piece: Piece) -> bytes:
        """Who speaks comes with the first token, why the answer ended in an event of its own."""
        events = b""
        if choice not in self._begun:
            self._begun.add(choice)
            events = self._chunks.of(_ChatChunkChoice(choice, _Delta("assistant", "")))
        if piece.text or piece.logprobs:
            logprobs = _chat_logprobs(piece.logprobs)
            events += self._chunks.of(_ChatChunkChoice(choice, _Delta(content=piece.text), logprobs))
        if piece.end is not None:
            events += self._chunks.of(_ChatChunkChoice(choice, _Delta(), None, piece.end.finish_reason))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunks.of_usage(usage)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        shaped: list[msgspec.Struct] = [
            _ChatChoice(
                index,
                _ChatMessage("assistant", "".join(piece.text for piece in pieces)),
                _chat_logprobs(_all_logprobs(pieces)),
                _finish_reason(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return _whole(self._heading, "chat.completion", shaped, usage)


def _chat_logprobs(tokens: Sequence[TokenLogprobs] | None) -> _ChatLogprobs | None:
    if tokens is None:
        return None
    return _ChatLogprobs(
        [
            _ChatToken(
                token.sampled.text,
                list(token.sampled.raw),
                _logprob(token.sampled),
                [_ChatLikely(one.text, list(one.raw), _logprob(one)) for one in token.top],
            )
            for token in tokens
        ]
    )


def _logprob(token: LikelyToken) -> float:
    return max(token.logprob, _LEAST_LOGPROB)


# --- completions ------------------------------------------------------------------------------------------------------


class _TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: _TextLogprobs | None = None
    finish_reason: str | None = None


class CompletionShape:
    def __init__(self, heading: Heading, includes_usage: bool) -> None:
        self._heading = heading
        self._chunks = _Chunks(heading, "text_completion", includes_usage)
        self._offsets: dict[int, int] = {}

    def chunk(self, choice: int, piece: Piece) -> bytes:
        if not piece.text and not piece.logprobs and piece.end is None:
            return b""
        reason = None if piece.end is None else piece.end.finish_reason
        return self._chunks.of(_TextChoice(choice, piece.text, self._logprobs(choice, piece.logprobs), reason))

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunks.of_usage(usage)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        shaped: list[msgspec.Struct] = [
            _TextChoice(
                index,
                "".join(piece.text for piece in pieces),
                self._logprobs(index, _all_logprobs(pieces)),
                _finish_reason(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return _whole(self._heading, "text_completion", shaped, usage)

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprobs] | None) -> _TextLogprobs | None:
        """The likeliest tokens with the sampled one among them; offsets are into the answer's text."""
        if tokens is None:
            return None
        shaped = _TextLogprobs([], [], [], [])
        offset = self._offsets.get(choice, 0)
        for token in tokens:
            shaped.tokens.append(token.sampled.text)
            shaped.token_logprobs.append(_logprob(token.sampled))
            likely = {one.text: _logprob(one) for one in reversed(token.top)}
            shaped.top_logprobs.append({token.sampled.text: _logprob(token.sampled), **likely})
            shaped.text_offset.append(offset)
            offset += len(token.sampled.text)
        self._offsets[choice] = offset
        return shaped


# --- models and errors ------------------------------------------------------------------------------------------------


class ModelShape(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "kvtier"


def model_list(models: list[ModelShape]) -> bytes:
    return _encode({"object": "list", "data": models})


def one_model(model: ModelShape) -> bytes:
    return _encode(model)


def error_body(problem: HttpError) -> bytes:
    sentence = problem.sentence
    if len(sentence) > _MAX_SENTENCE_CHARACTERS:
        sentence = sentence[: _MAX_SENTENCE_CHARACTERS - 3] + "..."
    error = {
        "message": sentence,
        "type": _error_type(problem.status),
        "param": problem.parameter,
        "code": problem.code or None,
    }
    return _encode({"error": error})


def error_event(problem: HttpError) -> bytes:
    """The last event of a stream that failed: the official client raises it. No `DONE` follows, for it is not done."""
    return b"data: " + error_body(problem) + b"\n\n"


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
