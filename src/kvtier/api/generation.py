"""A request to an engine and its answers, whole or streamed: the same for every API.

Each API reads its bodies into a `GenerationRequest` and encodes answers with its `AnswerEncoder`. However a request
ends, its answers are closed, which frees their blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvtier.api.access import ApiTenant, salt_of
from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.echo import Echo, parts_of
from kvtier.api.engine_connection import Answers, PromptRequest
from kvtier.api.engines import KnownModel
from kvtier.api.limits import MAX_SUBMITS_UNDER_WAY, MAX_WHOLE_LOGPROBS_BYTES
from kvtier.api.logprobs import EncodedLogprobs, SampledToken, sampled_tokens
from kvtier.api.prompt_form import SILENT, PromptForm
from kvtier.api.prompt_length import prompt_bytes
from kvtier.api.prompt_logprobs import encoded_prompt_logprobs
from kvtier.api.retention import NO_WISH, RetentionWish, combined
from kvtier.api.service import Service
from kvtier.blocks.retention import MAX_ACCOUNT_CHARS
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.grammar import DEAD_END
from kvtier.engine.process.messages import EncodedPrompt, Prompt, TextPrompt, TokenPrompt, decode_prompt, encode_part
from kvtier.engine.prompt_token import PromptToken
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineStopped, InvalidGrammar, InvalidParameter
from kvtier.sizes import format_size
from kvtier.tiers.parting import Parting
from kvtier.tiers.retention import RetentionOutcome

_COMPLETE = ("stop", "length")
_FAILED = "error"
_DEAD_END = "dead_end"
_MERGED_AHEAD = 64
_PIECES_PER_YIELD = 16


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid body. Each of `prompts` gets `params.n` answers. `name` is the client's name for the model.

    `record` has what else the API needs from the body to encode the answer, in the API's own encoding. Prompts of one
    `session` are compared with each other; with `explains`, which needs a single prompt, the usage says where it parts
    from earlier ones. `prefix` is the name of a prefix to put before the conversation. `retention` says which part of
    the prompts is to stay cached.
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
    """The field with the answer's grammar, for APIs whose errors name fields."""


@dataclass(slots=True)
class Usage:
    """The tokens of all prompts and answers of one request. A prompt counts once, regardless of its answers.

    `parting` is where the prompt parts from earlier ones, if requested and known; `retention` says what was to stay
    cached and what does.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    parting: Parting | None = None
    retention: list[RetentionOutcome] = field(default_factory=list)

    def add_answer(self, prompt_tokens: int, completion: Completion) -> None:
        """Add a complete answer. The cached tokens of its prompt are taken from the prompt's first answer."""
        self.completion_tokens += len(completion.token_ids)
        if not completion.index:
            self.add_cached(prompt_tokens, completion.cached_tokens)

    def add_cached(self, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        """Add the cached tokens of a prompt, by tier."""
        left = prompt_tokens
        for tier, count in cached_tokens.items():
            counted = min(count, left)
            left -= counted
            self.cached_tokens[tier] = self.cached_tokens.get(tier, 0) + counted

    @property
    def parted(self) -> dict[str, object] | msgspec.UnsetType:
        """`parting` in the form that all APIs share, with sentences for people."""
        if self.parting is None:
            return msgspec.UNSET
        fields: dict[str, object] = msgspec.to_builtins(self.parting)
        return fields | {"sentence": self.parting.sentence(), "advice": self.parting.advice()}

    @property
    def retained(self) -> list[dict[str, object]] | msgspec.UnsetType:
        """`retention` in the form that all APIs share."""
        return [outcome.shown() for outcome in self.retention] or msgspec.UNSET

    def written_tokens(self, model: KnownModel) -> int:
        """Tokens in full blocks of the prompt that were not cached before, and are now."""
        block_tokens = 0 if model.hello is None else model.hello.block_tokens
        full_tokens = self.prompt_tokens - self.prompt_tokens % block_tokens if block_tokens else 0
        return max(0, full_tokens - sum(self.cached_tokens.values()))


@dataclass(slots=True)
class WholeAnswer:
    """All pieces of one answer. `logprobs` are encoded by the answer's encoder; None if not requested."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[EncodedLogprobs] | None = None
    completion: Completion | None = None
    num_tokens: list[int] = field(default_factory=list)
    """The number of tokens of each of `texts`."""
    prompt_logprobs: list[bytes] | None = None
    """The prompt's log-probabilities in vLLM's form, if requested: pieces of a JSON list."""

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


class AnswerEncoder(Protocol):
    """Encodes the answers to one request in an API's form. `choice` numbers the answers to all prompts."""

    @property
    def media_type(self) -> str:
        """The media type of a stream."""

    def begin(self, prompt_ends: Sequence[str]) -> None:
        """Called once all prompts are in a queue, with the last text of each rendered prompt."""

    def chunk(
        self, choice: int, piece: StreamPiece, logprobs: Sequence[SampledToken] | None, prompt_tokens: int
    ) -> bytes:
        """The stream's bytes for a piece; may be empty."""

    def end(self, usage: Usage) -> bytes:
        """The end of a complete stream."""

    def error(self, error: Exception) -> bytes:
        """The end of a failed stream. Raises `error` if the API does not report errors of this type."""

    def logprobs(self, choice: int, tokens: Sequence[SampledToken]) -> EncodedLogprobs:
        """The encoded log-probabilities of a piece of an answer that is not streamed."""

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""

    def incomplete(self, reason: str | None) -> str:
        """A sentence about an answer that ended incomplete, for this reason."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One request that is being answered."""

    service: Service
    asked: GenerationRequest
    tenant: ApiTenant
    request_id: str
    encoder: AnswerEncoder

    async def whole(self) -> bytes:
        """The body of the response. Raises `HttpError` or `KvtierError`."""
        with self._place():
            async with self._submitted() as submitted:
                self.encoder.begin([answers.prompt_end for answers in submitted])
                usage = Usage(sum(answers.prompt_tokens for answers in submitted))
                found = [WholeAnswer() for _ in submitted for _ in range(self.asked.params.n)]
                work = _LogprobsWork()
                async with contextlib.aclosing(await self._pieces(submitted)) as pieces:
                    async for choice, piece in pieces:
                        answers = submitted[choice // self.asked.params.n]
                        if piece.prompt is not None:
                            await self._add_prompt_logprobs(found, choice, piece.prompt, answers, work)
                        if piece.completion is not None:
                            self._note_end(answers, piece.completion, usage)
                        found[choice].add(piece)
                        if logprobs := self._logprobs(answers, piece):
                            encoded = self.encoder.logprobs(choice, logprobs)
                            found[choice].add_logprobs(encoded)
                            work.note(encoded)
                            await work.yield_if_due()
                await self._explain(submitted, usage)
                return self.encoder.whole(found, usage)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """First an empty chunk, once all prompts are in an engine's queue, then the chunks of the stream.

        Errors before that are raised; a later error becomes the last chunk.
        """
        with self._place():
            async with self._submitted() as submitted:
                yield b""
                self.encoder.begin([answers.prompt_end for answers in submitted])
                try:
                    usage = Usage(sum(answers.prompt_tokens for answers in submitted))
                    work = _LogprobsWork()
                    async with contextlib.aclosing(await self._pieces(submitted)) as pieces:
                        async for choice, piece in pieces:
                            answers = submitted[choice // self.asked.params.n]
                            if piece.completion is not None:
                                self._note_end(answers, piece.completion, usage)
                            logprobs = None if piece.logprobs is None else self._logprobs(answers, piece)
                            chunk = self.encoder.chunk(choice, piece, logprobs, answers.prompt_tokens)
                            if chunk:
                                yield chunk
                            if logprobs:
                                await work.yield_if_due()
                    await self._explain(submitted, usage)
                except Exception as error:
                    yield self.encoder.error(error)
                    return
                if end := self.encoder.end(usage):
                    yield end

    async def _pieces(self, submitted: Sequence[Answers]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
        """The pieces of all answers as they arrive, with the number of their choice; prompts first if echoed."""
        asked = self.asked
        if not asked.prompt_form.echoes:
            return _merged(submitted)
        texts = [await self._text_of(prompt) for prompt in asked.prompts]
        num_tokens = [] if asked.params.logprobs is None else [answers.prompt_tokens for answers in submitted]
        return Echo(texts, asked.params.n, num_tokens).before(_merged(submitted))

    async def _text_of(self, prompt: Prompt | EncodedPrompt) -> str:
        """The text of a prompt; for token ids, an engine's tokenizer makes it."""
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
        self,
        found: Sequence[WholeAnswer],
        choice: int,
        tokens: Sequence[PromptToken],
        answers: Answers,
        work: _LogprobsWork,
    ) -> None:
        """Add the prompt's log-probabilities to all answers to the prompt of `choice`, which share them."""
        num_top = self.asked.prompt_form.num_logprobs
        if num_top is None:
            return
        first = choice - choice % self.asked.params.n
        kept = found[first].prompt_logprobs or []
        for answer in found[first : first + self.asked.params.n]:
            answer.prompt_logprobs = kept
        for part in parts_of(tokens):
            kept.append(encoded_prompt_logprobs(part, answers.token_bytes, num_top))
            work.note(kept[-1:])
            await work.yield_if_due()

    def _place(self) -> contextlib.AbstractContextManager[None]:
        prompts = self.asked.prompts
        num_answers = len(prompts) * self.asked.params.n
        return self.service.place(self.tenant, num_answers, sum(map(prompt_bytes, prompts)))

    @contextlib.asynccontextmanager
    async def _submitted(self) -> AsyncIterator[Sequence[Answers]]:
        """A scope with the answers to each prompt, once all prompts are in a queue. They are closed at its end."""
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
                question = PromptRequest(
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
                    raise InvalidGrammar(str(error), asked.grammar_field) from error

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
        """Raises `InvalidGrammar`, `AnswerFailed` or `EngineStopped` for an answer that ended incomplete."""
        if completion.finish_reason == _DEAD_END:
            raise InvalidGrammar(DEAD_END, self.asked.grammar_field)
        if completion.finish_reason == _FAILED:
            raise AnswerFailed("the engine failed on this request: see its log")
        if completion.finish_reason not in _COMPLETE:
            raise EngineStopped(self.encoder.incomplete(completion.finish_reason))
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


class _LogprobsWork:
    """Encoding log-probabilities is slow: every few pieces the event loop gets a chance to serve other requests."""

    def __init__(self) -> None:
        self._num_pieces = 0
        self._num_bytes = 0

    def note(self, encoded: Sequence[bytes]) -> None:
        """Count encoded bytes. Raises `InvalidParameter` if an answer that is not streamed has too many."""
        self._num_bytes += sum(map(len, encoded))
        if self._num_bytes > MAX_WHOLE_LOGPROBS_BYTES:
            limit = format_size(MAX_WHOLE_LOGPROBS_BYTES)
            raise InvalidParameter(f"logprobs must take less than {limit} without a stream: ask for fewer, or stream")

    async def yield_if_due(self) -> None:
        self._num_pieces += 1
        if self._num_pieces % _PIECES_PER_YIELD == 0:
            await asyncio.sleep(0)


def _merged(submitted: Sequence[Answers]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    """The pieces of all answers as they arrive, with the number of their choice."""
    return submitted[0].pieces() if len(submitted) == 1 else _merged_several(submitted)


async def _merged_several(submitted: Sequence[Answers]) -> AsyncGenerator[tuple[int, StreamPiece], None]:
    arrived: asyncio.Queue[tuple[int, StreamPiece] | None] = asyncio.Queue(_MERGED_AHEAD)

    async def pass_on(answers: Answers, first_choice: int) -> None:
        try:
            async for numbered in answers.pieces(first_choice):
                await arrived.put(numbered)
        except Exception:
            await arrived.put(None)
            raise
        await arrived.put(None)

    passing = [
        asyncio.create_task(pass_on(answers, number * answers.num_answers)) for number, answers in enumerate(submitted)
    ]
    try:
        num_open = len(passing)
        while num_open:
            numbered = await arrived.get()
            if numbered is not None:
                yield numbered
                continue
            num_open -= 1
            await asyncio.sleep(0)  # lets the task that sent None finish
            for task in passing:
                if task.done():
                    task.result()  # raises its error
    finally:
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
