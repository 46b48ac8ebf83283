"""What comes out: tokens, text and times of each answer to a prompt. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvtier.engine.schedule.request import Request


class TextSource(Protocol):
    """Turns tokens into text as they come (`kvtier.models.tokenizer.TextStream`)."""

    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `logprobs[i]` are those of output token i, by token id, when they were asked for."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None
    ttft_s: float
    time_per_output_token_s: float
    cached_tokens: dict[str, int]


class StreamPiece(msgspec.Struct, frozen=True, array_like=True):
    """What a step brought for answer `index`: new tokens and text, and at its end the whole completion.

    `logprobs[i]` are those of `token_ids[i]`, by token id, when they were asked for. `text` may be empty: a stop
    string, or a character, is not complete. The engine makes a piece, and the HTTP server gets it as it is.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None = None
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `error` is set, and there are none, when the request could not be served."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)
    error: str | None = None


class AnswerText:
    """The text of one answer as it grows, and where a stop string ends it.

    `take` returns what may be shown: the end of the text is held back while it may be the beginning of a stop string.
    Stop strings in the text of the first `min_tokens` tokens, but for the last of them, are text like any other.
    """

    def __init__(self, source: TextSource | None, stop_strings: tuple[str, ...], *, min_tokens: int = 0) -> None:
        self.text = ""
        self.is_stopped = False
        self._source = source
        self._stop_strings = stop_strings
        self._held = max((len(stop) for stop in stop_strings), default=1) - 1
        self._num_shown = 0
        self._num_early = max(0, min_tokens - 1)
        self._searched_from = 0

    def push(self, token_id: int) -> bool:
        """Add a token; True when a stop string is complete: the text ends before it."""
        if self._source is not None and not self.is_stopped:
            self._add(self._source.push([token_id]))
            if self._num_early:
                self._num_early -= 1
                self._searched_from = len(self.text)
        return self.is_stopped

    def finish(self) -> None:
        """No more tokens come."""
        if self._source is not None and not self.is_stopped:
            self._add(self._source.finish())
        self._held = 0

    def take(self) -> str:
        """What may be shown and was not taken yet."""
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
        ends = [end for stop in self._stop_strings if (end := self.text.find(stop, first)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.is_stopped = True


def completion_of(request: Request, text: str) -> Completion:
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
    )


def cached_tokens_of(request: Request) -> dict[str, int]:
    """By tier, from fast to slow as they were used."""
    return {"device": request.cached_tokens, **request.prefetch.loaded_tokens}
