"""An engine's output: tokens, text and times of each answer to a prompt. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvtier.engine.prompt_token import PromptToken
from kvtier.engine.schedule.request import Request


class Detokenizer(Protocol):
    """Turns tokens into text as they arrive (`kvtier.models.tokenizer.TextStream`)."""

    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class PrefixEnd(msgspec.Struct, frozen=True, array_like=True):
    """Where the cached part of a prompt ended, and why: `reason` is a `MatchEnd` in words, reported by `tier`."""

    at_tokens: int
    reason: str
    tier: str = ""
    detail: str = ""


class AnswerTimes(msgspec.Struct, frozen=True, array_like=True):
    """When each stage of a request began or ended, by `time.monotonic` of its host; zero if it did not occur.

    In order: the request arrived, tiers were asked, they answered, the first load began, the last load ended, computing
    the prompt began, the first token came, the request finished.
    """

    arrived_at: float
    asked_at: float
    answered_at: float
    load_began_at: float
    load_ended_at: float
    prefill_at: float
    first_token_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `logprobs[i]` are those of output token i, by token id, if they were requested.

    `stop` is the stop string that ended it, if one did. `prompt_logprobs` are those of the prompt's tokens, if they
    were requested; only the first of several answers has them. `prefix_end` is set if the engine has tiers. `times` are
    those of the request's stages in the engine.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None
    ttft_s: float
    time_per_output_token_s: float
    cached_tokens: dict[str, int]
    stop: str | None = None
    prompt_logprobs: list[PromptToken] | None = None
    prefix_end: PrefixEnd | None = None
    times: AnswerTimes | None = None


class StreamPiece(msgspec.Struct, frozen=True, array_like=True):
    """One step's news of answer `index`: new tokens and text, and at its end the whole completion.

    `logprobs[i]` are those of `token_ids[i]`, by token id, if they were requested. `text` may be empty while a stop
    string or a character is incomplete. `prompt` has the prompt's next tokens, if their log-probabilities were
    requested; those of a long prompt come in several pieces, before the answer. The first piece with tokens of a
    prompt's first answer has what was `cached` of the prompt, by tier. The engine makes a piece, which reaches the HTTP
    server unchanged.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None = None
    completion: Completion | None = None
    prompt: list[PromptToken] | None = None
    cached: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. If the request could not be served, there are none, and `error` is set."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)
    error: str | None = None


class AnswerText:
    """The text of one answer as it grows, and where a stop string ends it.

    `take` returns what may be shown: the end of the text is held back while it may be the beginning of a stop string.
    Stop strings that are complete before token number `min_tokens` are ordinary text.
    """

    def __init__(self, source: Detokenizer | None, stop_strings: tuple[str, ...], *, min_tokens: int = 0) -> None:
        self.text = ""
        self.stop: str | None = None
        """The stop string that ended the text."""
        self._source = source
        self._stop_strings = stop_strings
        self._held = max((len(stop) for stop in stop_strings), default=1) - 1
        self._num_shown = 0
        self._num_early = max(0, min_tokens - 1)
        self._searched_from = 0

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def push(self, token_id: int) -> bool:
        """Add a token. True if a stop string is complete; the text ends before it."""
        if self._source is not None and not self.is_stopped:
            self._add(self._source.push([token_id]))
            if self._num_early:
                self._num_early -= 1
                self._searched_from = len(self.text)
        return self.is_stopped

    def finish(self) -> None:
        """There are no more tokens."""
        if self._source is not None and not self.is_stopped:
            self._add(self._source.finish())
        self._held = 0

    def take(self) -> str:
        """The text that may be shown and was not taken yet."""
        end = len(self.text) if self.is_stopped else max(self._num_shown, len(self.text) - self._held)
        piece = self.text[self._num_shown : end]
        self._num_shown = end
        return piece

    def _add(self, piece: str) -> None:
        if not piece:
            return
        first = max(self._searched_from, len(self.text) - max((len(stop) for stop in self._stop_strings), default=0))
        self.text += piece
        if self._num_early:
            return
        ends = [(end, stop) for stop in self._stop_strings if (end := self.text.find(stop, first)) >= 0]
        if ends:
            end, self.stop = min(ends)
            self.text = self.text[:end]


def completion_of(request: Request, text: str, stop: str | None = None) -> Completion:
    """The state of a request as its caller sees it."""
    times = request.times
    return Completion(
        index=request.index,
        token_ids=request.output_tokens,
        text=text,
        finish_reason=None if request.finish_reason is None else request.finish_reason.value,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        ttft_s=times.ttft_s() if times.first_token_at else 0.0,
        time_per_output_token_s=times.time_per_output_token_s(request.num_outputs) if times.finished_at else 0.0,
        cached_tokens=cached_tokens_of(request),
        stop=stop,
        prompt_logprobs=request.prompt_scores if request.wants_prompt_scores else None,
        prefix_end=_prefix_end(request),
        times=_times_of(request),
    )


def piece_of(request: Request, token_ids: list[int], text: str, completion: Completion | None = None) -> StreamPiece:
    """The news of a step, with scores of the prompt that no piece has had yet."""
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = request.logprobs[len(request.logprobs) - len(token_ids) :]
    prompt = None
    if request.params.prompt_logprobs is not None and request.num_scores_told < len(request.prompt_scores):
        prompt = request.prompt_scores[request.num_scores_told :]
        request.num_scores_told = len(request.prompt_scores)
    cached = None
    is_first = request.index == 0 and request.num_outputs == len(token_ids)
    if is_first and (token_ids or completion is not None):
        cached = {tier: count for tier, count in cached_tokens_of(request).items() if count}
    return StreamPiece(request.index, token_ids, text, logprobs, completion, prompt, cached)


def _times_of(request: Request) -> AnswerTimes:
    times, history = request.times, request.prefetch.history
    return AnswerTimes(
        times.arrived_at,
        history.asked_at,
        history.answered_at,
        history.load_began_at,
        history.load_ended_at,
        times.prefill_at,
        times.first_token_at,
        times.finished_at,
    )


def _prefix_end(request: Request) -> PrefixEnd | None:
    ending = request.prefetch.ending
    if ending is None:
        return None
    at_tokens = min(ending.position * request.prefetch.blocks.block_tokens, request.prompt_tokens)
    return PrefixEnd(at_tokens, ending.reason.value, ending.tier, ending.detail)


def cached_tokens_of(request: Request) -> dict[str, int]:
    """Cached tokens by tier, fastest first."""
    return {"device": request.cached_tokens, **request.prefetch.history.loaded_tokens}
