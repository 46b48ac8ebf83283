"""What a body asks of an engine, and its answers on their way back, whole or streamed: the same for every API.

An API reads its bodies into a `GenerationRequest` and gives the answers their `Shape`. However a request ends, its
answers are closed, which frees their blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvtier.api.access import Tenant, salt_of
from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.echo import Echo, parts_of
from kvtier.api.engine_connection import Answers, Question
from kvtier.api.engines import KnownModel
from kvtier.api.http_error import HttpError
from kvtier.api.limits import MAX_SUBMITS_UNDER_WAY, MAX_WHOLE_LOGPROBS_BYTES
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, sampled_tokens
from kvtier.api.prompt_form import SILENT, PromptForm
from kvtier.api.prompt_length import prompt_bytes
from kvtier.api.prompt_logprobs import encoded_prompt_logprobs
from kvtier.api.retention import NO_WISH, RetentionWish, combined
from kvtier.api.service import Service
from kvtier.blocks.retention import MAX_ACCOUNT_CHARS
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.process.messages import EncodedPrompt, Prompt, TextPrompt, TokenPrompt, decode_prompt, encode_part
from kvtier.engine.prompt_token import PromptToken
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineStopped, InvalidGrammar, InvalidParameter
from kvtier.sizes import format_size
from kvtier.tiers.parting import Parting
from kvtier.tiers.retention import RetentionOutcome

_COMPLETE = ("stop", "length")
_FAILED = "error"
_MERGED_AHEAD = 64
_PIECES_OF_A_TURN = 16


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A body that can be served. Each of `prompts` gets `params.n` answers. The client calls the model `name`.

    `record` is what else its API has to know of the body to shape the answer, as that API encodes it. Prompts of one
    `session` are compared with each other; with `explains` the usage says where the prompt, which is one, parts from
    earlier ones. `prefix` is the name of what stands before the conversation. `retention` is what of the prompts is to
    stay cached.
    """

    name: str
    model: KnownModel
    prompts: Sequence[Prompt | EncodedPrompt]
    params: SamplingParams
    is_streamed: bool
    includes_usage: bool = False
    cache_salt: str = ""
    form: AnswerForm = PLAIN
    record: bytes = b""
    prompt_form: PromptForm = SILENT
    session: str = ""
    explains: bool = False
    prefix: str = ""
    retention: RetentionWish = NO_WISH
    grammar_field: str = ""
    """The field that asks for what the answer must follow, if errors of its API name fields."""


@dataclass(slots=True)
class Usage:
    """The tokens of all prompts and answers of one request. A prompt counts once, however many answers it has.

    `parting` is where the prompt parts from earlier ones, if that was asked for and is known; `retention` what was to
    stay cached, and what does.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    parting: Parting | None = None
    retention: list[RetentionOutcome] = field(default_factory=list)

    def add_answer(self, prompt_tokens: int, completion: Completion) -> None:
        """An answer is complete. What was cached of its prompt is taken from the first one."""
        self.completion_tokens += len(completion.token_ids)
        if not completion.index:
            self.add_cached(prompt_tokens, completion.cached_tokens)

    def add_cached(self, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        """What was cached of a prompt, by tier."""
        left = prompt_tokens
        for tier, count in cached_tokens.items():
            counted = min(count, left)
            left -= counted
            self.cached_tokens[tier] = self.cached_tokens.get(tier, 0) + counted

    @property
    def parted(self) -> dict[str, object] | msgspec.UnsetType:
        """`parting` as every API shows it, with sentences for people."""
        if self.parting is None:
            return msgspec.UNSET
        fields: dict[str, object] = msgspec.to_builtins(self.parting)
        return fields | {"sentence": self.parting.sentence(), "advice": self.parting.advice()}

    @property
    def retained(self) -> list[dict[str, object]] | msgspec.UnsetType:
        """`retention` as every API shows it."""
        return [outcome.shown() for outcome in self.retention] or msgspec.UNSET

    def written_tokens(self, model: KnownModel) -> int:
        """Those of a prompt's full blocks that were in no cache before: now they are."""
        block_tokens = 0 if model.hello is None else model.hello.block_tokens
        full_tokens = self.prompt_tokens - self.prompt_tokens % block_tokens if block_tokens else 0
        return max(0, full_tokens - sum(self.cached_tokens.values()))


@dataclass(slots=True)
class WholeAnswer:
    """All that came for one answer. `logprobs`, as its shape encodes them, is None when they were not asked for."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[EncodedLogprobs] | None = None
    completion: Completion | None = None
    num_tokens: list[int] = field(default_factory=list)
    """Of each of `texts`."""
    prompt_logprobs: list[bytes] | None = None
    """Of the prompt, as vLLM shows them, if they are asked for: pieces of a list in JSON."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        return None if self.completion is None else self.completion.finish_reason

    def add(self, piece: StreamPiece) -> None:
        self.texts.append(piece.text)
        self.num_tokens.append(len(piece.token_ids))
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

    def begin(self, prompt_ends: Sequence[str]) -> None:
        """All prompts are in a queue; these are the ends of conversations as their templates wrote them."""

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
                self.shape.begin([answers.prompt_end for answers in submitted])
                usage = Usage(sum(answers.prompt_tokens for answers in submitted))
                found = [WholeAnswer() for _ in submitted for _ in range(self.asked.params.n)]
                turns = _Turns()
                async with contextlib.aclosing(await self._pieces(submitted)) as pieces:
                    async for choice, piece in pieces:
                        answers = submitted[choice // self.asked.params.n]
                        if piece.prompt is not None:
                            await self._add_prompt_logprobs(found, choice, piece.prompt, answers, turns)
                        if piece.completion is not None:
                            self._note_end(answers, piece.completion, usage)
                        found[choice].add(piece)
                        if logprobs := self._logprobs(answers, piece):
                            encoded = self.shape.logprobs(choice, logprobs)
                            found[choice].add_logprobs(encoded)
                            turns.note(encoded)
                            await turns.take()
                await self._explain(submitted, usage)
                return self.shape.whole(found, usage)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """First nothing, when every prompt is in an engine's queue, then the chunks of the stream.

        What is wrong before that is raised; what goes wrong later is the last chunk.
        """
        with self._place():
            async with self._submitted() as submitted:
                yield b""
                self.shape.begin([answers.prompt_end for answers in submitted])
                try:
                    usage = Usage(sum(answers.prompt_tokens for answers in submitted))
                    turns = _Turns()
                    async with contextlib.aclosing(await self._pieces(submitted)) as pieces:
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
                    await self._explain(submitted, usage)
                except Exception as error:
                    yield self.shape.error(error)
                    return
                if end := self.shape.end(usage):
                    yield end

    async def _pieces(self, submitted: Sequence[Answers]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
        """What comes for any of these, as it comes, with the number of its choice; behind the prompts, if asked for."""
        asked = self.asked
        if not asked.prompt_form.echoes:
            return _merged(submitted)
        texts = [await self._text_of(prompt) for prompt in asked.prompts]
        num_tokens = [] if asked.params.logprobs is None else [answers.prompt_tokens for answers in submitted]
        return Echo(texts, asked.params.n, num_tokens).before(_merged(submitted))

    async def _text_of(self, prompt: Prompt | EncodedPrompt) -> str:
        """Of token ids, an engine's tokenizer knows it."""
        if isinstance(prompt, EncodedPrompt):
            prompt = decode_prompt(prompt.encoded)
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt), "no chat is echoed"
        engines = self.service.engines
        skips = self.asked.params.skip_special_tokens
        return await engines.detokenize(
            engines.find(self.asked.model.name), prompt.token_ids, skip_special_tokens=skips
        )

    async def _add_prompt_logprobs(
        self, found: Sequence[WholeAnswer], choice: int, tokens: Sequence[PromptToken], answers: Answers, turns: _Turns
    ) -> None:
        """To all answers to the prompt of `choice`, which share them."""
        num_top = self.asked.prompt_form.num_logprobs
        if num_top is None:
            return
        first = choice - choice % self.asked.params.n
        kept = found[first].prompt_logprobs or []
        for answer in found[first : first + self.asked.params.n]:
            answer.prompt_logprobs = kept
        for part in parts_of(tokens):
            kept.append(encoded_prompt_logprobs(part, answers.token_bytes, num_top))
            turns.note(kept[-1:])
            await turns.take()

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
        account = f"key {self.tenant.name}"[:MAX_ACCOUNT_CHARS] if self.tenant.name else ""
        asks = self.tenant.retention.asks(asked.retention, account)
        places = asyncio.Semaphore(MAX_SUBMITS_UNDER_WAY)

        async def submit(number: int, prompt: Prompt | EncodedPrompt) -> Answers:
            request_id = self.request_id if len(asked.prompts) == 1 else f"{self.request_id}-{number}"
            async with places:
                question = Question(
                    prompt,
                    params,
                    asked.params.n,
                    request_id,
                    salt,
                    client,
                    asked.session,
                    asked.explains,
                    retention=asks,
                )
                try:
                    return await engines.submit(model, question)
                except InvalidGrammar as error:
                    raise HttpError(400, str(error), "invalid_value", asked.grammar_field or None) from error

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
            raise AnswerFailed("the engine failed on this request: see its log")
        if completion.finish_reason not in _COMPLETE:
            raise EngineStopped(self.shape.broken_off(completion.finish_reason))
        usage.add_answer(answers.prompt_tokens, completion)
        self.service.tracing.note_answer(self.asked.model.name, self.request_id, answers.prompt_tokens, completion)
        self.service.count(self.asked.model.name, self.tenant, answers, completion)

    async def _explain(self, submitted: Sequence[Answers], usage: Usage) -> None:
        if self.asked.explains:
            usage.parting = await submitted[0].parting()
        usage.retention = combined([await answers.retention() for answers in submitted])

    def _logprobs(self, answers: Answers, piece: StreamPiece) -> list[SampledToken] | None:
        if piece.logprobs is None:
            return None
        return sampled_tokens(piece, answers.token_bytes, self.asked.params.logprobs or 0)


class _Turns:
    """Logprobs take long to shape: now and then others come first, also when further pieces have come."""

    def __init__(self) -> None:
        self._num_pieces = 0
        self._num_bytes = 0

    def note(self, encoded: Sequence[bytes]) -> None:
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
