"""What a body asks of an engine, and its answers on their way back, whole or streamed: the same for every API.

An API reads its bodies into a `GenerationRequest` and gives the answers their `Shape`. However a request ends, its
answers are closed, which frees their blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvtier.api.access import Tenant, salt_of
from kvtier.api.engine_connection import Answers, Question
from kvtier.api.engines import KnownModel
from kvtier.api.limits import MAX_SUBMITS_UNDER_WAY, MAX_WHOLE_LOGPROBS_BYTES
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, sampled_tokens
from kvtier.api.prompt_length import prompt_bytes
from kvtier.api.service import Service
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.process.messages import EncodedPrompt, Prompt, encode_part
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineStopped, InvalidParameter
from kvtier.sizes import format_size

_COMPLETE = ("stop", "length")
_FAILED = "error"
_MERGED_AHEAD = 64
_PIECES_OF_A_TURN = 16


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A body that can be served. Each of `prompts` gets `params.n` answers. The client calls the model `name`."""

    name: str
    model: KnownModel
    prompts: Sequence[Prompt | EncodedPrompt]
    params: SamplingParams
    is_streamed: bool
    includes_usage: bool = False
    cache_salt: str = ""


@dataclass(slots=True)
class Usage:
    """The tokens of all prompts and answers of one request. A prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)

    def add_answer(self, prompt_tokens: int, completion: Completion) -> None:
        """An answer is complete. What was cached of its prompt is taken from the first one."""
        self.completion_tokens += len(completion.token_ids)
        if completion.index:
            return
        left = prompt_tokens
        for tier, count in completion.cached_tokens.items():
            counted = min(count, left)
            left -= counted
            self.cached_tokens[tier] = self.cached_tokens.get(tier, 0) + counted


@dataclass(slots=True)
class WholeAnswer:
    """All that came for one answer. `logprobs`, as its shape encodes them, is None when they were not asked for."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[EncodedLogprobs] | None = None
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        return None if self.completion is None else self.completion.finish_reason

    def add(self, piece: StreamPiece) -> None:
        self.texts.append(piece.text)
        self.completion = piece.completion
        if piece.logprobs is not None and self.logprobs is None:
            self.logprobs = []

    def add_logprobs(self, encoded: EncodedLogprobs) -> None:
        assert self.logprobs is not None
        self.logprobs.append(encoded)


class Shape(Protocol):
    """How an API shows the answers to one request, in bytes. `choice` counts through all answers of all prompts."""

    @property
    def media_type(self) -> str:
        """Of a stream."""

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        """What a stream says of a piece; empty if there is nothing to say yet."""

    def end(self, usage: Usage) -> bytes:
        """The end of a stream that is complete."""

    def error(self, error: Exception) -> bytes:
        """The end of a stream that failed. Raises `error` if the API says nothing of such errors."""

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        """Those of a piece of an answer that is not streamed."""

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""

    def broken_off(self, reason: str | None) -> str:
        """A sentence about an answer that ended, for this reason, and is not complete."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One request while it is answered."""

    service: Service
    asked: GenerationRequest
    tenant: Tenant
    request_id: str
    shape: Shape

    async def whole(self) -> bytes:
        """The body of the response. Raises a `HttpError` or a `KvtierError`."""
        with self._place():
            async with self._submitted() as submitted:
                usage = Usage(sum(answers.prompt_tokens for answers in submitted))
                found = [WholeAnswer() for _ in submitted for _ in range(self.asked.params.n)]
                turns = _Turns()
                async with contextlib.aclosing(_merged(submitted)) as pieces:
                    async for choice, piece in pieces:
                        answers = submitted[choice // self.asked.params.n]
                        if piece.completion is not None:
                            self._note_end(answers, piece.completion, usage)
                        found[choice].add(piece)
                        if logprobs := self._logprobs(answers, piece):
                            encoded = self.shape.logprobs(choice, logprobs)
                            found[choice].add_logprobs(encoded)
                            turns.note(encoded)
                            await turns.take()
                return self.shape.whole(found, usage)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """First nothing, when every prompt is in an engine's queue, then the chunks of the stream.

        What is wrong before that is raised; what goes wrong later is the last chunk.
        """
        with self._place():
            async with self._submitted() as submitted:
                yield b""
                try:
                    usage = Usage(sum(answers.prompt_tokens for answers in submitted))
                    turns = _Turns()
                    async with contextlib.aclosing(_merged(submitted)) as pieces:
                        async for choice, piece in pieces:
                            answers = submitted[choice // self.asked.params.n]
                            if piece.completion is not None:
                                self._note_end(answers, piece.completion, usage)
                            logprobs = None if piece.logprobs is None else self._logprobs(answers, piece)
                            chunk = self.shape.chunk(choice, piece, logprobs, answers.prompt_tokens)
                            if chunk:
                                yield chunk
                            if logprobs:
                                await turns.take()
                except Exception as error:
                    yield self.shape.error(error)
                    return
                if end := self.shape.end(usage):
                    yield end

    def _place(self) -> contextlib.AbstractContextManager[None]:
        prompts = self.asked.prompts
        num_answers = len(prompts) * self.asked.params.n
        return self.service.place(self.tenant, num_answers, sum(map(prompt_bytes, prompts)))

    @contextlib.asynccontextmanager
    async def _submitted(self) -> AsyncIterator[Sequence[Answers]]:
        """The answers to each prompt, all of which are in a queue. Afterwards they are closed."""
        asked, engines = self.asked, self.service.engines
        salt, params = salt_of(self.tenant, asked.cache_salt), msgspec.Raw(encode_part(asked.params))
        model = engines.find(asked.model.name)
        client = f"key {self.tenant.name}" if self.tenant.name else f"request {self.request_id}"
        places = asyncio.Semaphore(MAX_SUBMITS_UNDER_WAY)

        async def submit(number: int, prompt: Prompt | EncodedPrompt) -> Answers:
            request_id = self.request_id if len(asked.prompts) == 1 else f"{self.request_id}-{number}"
            async with places:
                question = Question(prompt, params, asked.params.n, request_id, salt, client)
                return await engines.submit(model, question)

        submitting = [asyncio.ensure_future(submit(number, prompt)) for number, prompt in enumerate(asked.prompts)]
        try:
            yield await asyncio.gather(*submitting)
        finally:
            for task in submitting:
                task.cancel()
            for outcome in await asyncio.gather(*submitting, return_exceptions=True):
                if isinstance(outcome, Answers):
                    outcome.close()

    def _note_end(self, answers: Answers, completion: Completion, usage: Usage) -> None:
        """Raises `AnswerFailed` or `EngineStopped` for an answer that ended and is not complete."""
        if completion.finish_reason == _FAILED:
            raise AnswerFailed("the engine failed at this request; its log has more")
        if completion.finish_reason not in _COMPLETE:
            raise EngineStopped(self.shape.broken_off(completion.finish_reason))
        usage.add_answer(answers.prompt_tokens, completion)
        self.service.count(self.asked.model.name, self.tenant, answers.prompt_tokens, completion)

    def _logprobs(self, answers: Answers, piece: StreamPiece) -> list[SampledToken] | None:
        if piece.logprobs is None:
            return None
        return sampled_tokens(piece, answers.token_bytes, self.asked.params.logprobs or 0)


class _Turns:
    """Logprobs take long to shape: now and then others come first, also when further pieces have come."""

    def __init__(self) -> None:
        self._num_pieces = 0
        self._num_bytes = 0

    def note(self, encoded: EncodedLogprobs) -> None:
        """Raises `InvalidParameter` when too much is kept of an answer that is not streamed."""
        self._num_bytes += sum(map(len, encoded))
        if self._num_bytes > MAX_WHOLE_LOGPROBS_BYTES:
            limit = format_size(MAX_WHOLE_LOGPROBS_BYTES)
            raise InvalidParameter(f"logprobs must take less than {limit} without a stream: ask for fewer, or stream")

    async def take(self) -> None:
        self._num_pieces += 1
        if self._num_pieces % _PIECES_OF_A_TURN == 0:
            await asyncio.sleep(0)


def _merged(submitted: Sequence[Answers]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    """What comes for any of these, as it comes, with the number of its choice."""
    return submitted[0].pieces() if len(submitted) == 1 else _merged_several(submitted)


async def _merged_several(submitted: Sequence[Answers]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    came: asyncio.Queue[tuple[int, StreamPiece] | None] = asyncio.Queue(_MERGED_AHEAD)

    async def pass_on(answers: Answers, first_choice: int) -> None:
        try:
            async for numbered in answers.pieces(first_choice):
                await came.put(numbered)
        except Exception:
            await came.put(None)
            raise
        await came.put(None)

    passing = [
        asyncio.create_task(pass_on(answers, number * answers.num_answers)) for number, answers in enumerate(submitted)
    ]
    try:
        num_open = len(passing)
        while num_open:
            numbered = await came.get()
            if numbered is not None:
                yield numbered
                continue
            num_open -= 1
            await asyncio.sleep(0)  # for the task that ended, to be over
            for task in passing:
                if task.done():
                    task.result()  # raises what ended it
    finally:
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
