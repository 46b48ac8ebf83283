"""An answer on its way from an engine to a client of Ollama's API: lines of JSON as it grows, or one object."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from kvtier.api.access import Tenant
from kvtier.api.engine_connection import Answers
from kvtier.api.ollama.requests import Ask, Kind, LoadModel
from kvtier.api.service import Service
from kvtier.engine.process.messages import End, LikelyToken, Piece, TokenLogprobs
from kvtier.errors import EngineStopped, KvtierError

logger = logging.getLogger(__name__)

_DONE_REASONS = ("stop", "length")
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""

_encode = msgspec.json.Encoder().encode


class _Message(msgspec.Struct):
    role: str
    content: str


class _Token(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _SampledToken(_Token):
    top_logprobs: list[_Token]


class _Line(msgspec.Struct, kw_only=True):
    """One object of Ollama's; durations are in nanoseconds. `cached_tokens` by tier is ours."""

    model: str
    created_at: datetime
    response: str | UnsetType = UNSET
    message: _Message | UnsetType = UNSET
    logprobs: list[_SampledToken] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cached_tokens: dict[str, int] | UnsetType = UNSET


def loaded(load: LoadModel) -> bytes:
    line = _line(load, "")
    line.done = True
    line.done_reason = load.done_reason
    return _encode(line)


@dataclass(frozen=True, slots=True)
class Answering:
    """One prompt while it is answered. Its blocks are freed when `lines` is closed or `whole` ends, however it ends."""

    service: Service
    ask: Ask
    tenant: Tenant
    request_id: str
    started_ns: int = field(default_factory=time.monotonic_ns)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The first is empty: the engine has taken the prompt. What is wrong with that was raised before.

        What goes wrong later is a line too, the last one.
        """
        with self.service.place():
            answers = await self._submit()
            try:
                yield b""
                async for piece in answers:
                    if line := self._lines_of(piece, answers):
                        yield line
            except KvtierError as error:
                yield _error_line(str(error))
            except Exception:
                logger.exception("request %s failed", self.request_id)
                yield _error_line("internal error: the server's log says more")
            finally:
                answers.close()

    async def whole(self) -> bytes:
        """All of it in one object. Raises a `HttpError` or a `KvtierError`."""
        text = ""
        logprobs: list[TokenLogprobs] = []
        with self.service.place():
            answers = await self._submit()
            try:
                async for piece in answers:
                    text += piece.text
                    logprobs += piece.logprobs or ()
                    if piece.end is not None:
                        return _encode(self._last(text, logprobs, answers, piece.end))
            finally:
                answers.close()
        raise EngineStopped("the engine ended the answer without a word")

    async def _submit(self) -> Answers:
        ask = self.ask
        return await self.service.submit(
            ask.model, ask.prompt, ask.params, request_id=self.request_id, tenant=self.tenant
        )

    def _lines_of(self, piece: Piece, answers: Answers) -> bytes:
        came = b""
        if piece.text or piece.logprobs:
            line = _line(self.ask, piece.text)
            if piece.logprobs:
                line.logprobs = _tokens(piece.logprobs)
            came = _encode(line) + b"\n"
        if piece.end is not None:
            came += _encode(self._last("", (), answers, piece.end)) + b"\n"
        return came

    def _last(self, text: str, logprobs: Sequence[TokenLogprobs], answers: Answers, end: End) -> _Line:
        if end.finish_reason not in _DONE_REASONS:
            raise EngineStopped(f"the engine gave the answer up ({end.finish_reason})")
        self.service.count(self.ask.model, answers.prompt_tokens, end)
        line = _line(self.ask, text)
        if logprobs:
            line.logprobs = _tokens(logprobs)
        line.done = True
        line.done_reason = end.finish_reason
        line.total_duration = time.monotonic_ns() - self.started_ns
        line.load_duration = 0
        line.prompt_eval_count = answers.prompt_tokens
        line.prompt_eval_duration = _nanoseconds(end.ttft_s)
        line.eval_count = end.output_tokens
        line.eval_duration = _nanoseconds(end.decode_s)
        line.cached_tokens = end.cached_tokens
        return line


def _line(asked: Ask | LoadModel, text: str) -> _Line:
    now = datetime.now(UTC)
    if asked.kind is Kind.CHAT:
        return _Line(model=asked.name, created_at=now, message=_Message("assistant", text))
    return _Line(model=asked.name, created_at=now, response=text)


def _error_line(sentence: str) -> bytes:
    return _encode({"error": sentence}) + b"\n"


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it, also for an answer of one token."""
    return max(1, round(seconds * 1e9))


def _tokens(found: Sequence[TokenLogprobs]) -> list[_SampledToken]:
    return [
        _SampledToken(*_token_fields(one.sampled), [_Token(*_token_fields(token)) for token in one.top])
        for one in found
    ]


def _token_fields(token: LikelyToken) -> tuple[str, float, list[int]]:
    return token.text, max(token.logprob, _LEAST_LOGPROB), list(token.raw)
