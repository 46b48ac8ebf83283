"""One engine's process, as the HTTP server sees it: a Unix socket that is connected again whenever it was lost.

Everything runs in the server's event loop. When the engine is gone, whatever was asked of it ends with `EngineAway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.api.limits import MAX_UNREAD_PIECES, UNREAD_PIECES_PER_ANSWER
from kvtier.engine.answer import StreamPiece
from kvtier.engine.process.messages import (
    FAILED,
    GRAMMAR,
    INVALID,
    LENGTH_BYTES,
    TOO_LONG,
    Abort,
    Accepted,
    AskMetrics,
    AskParting,
    AskWarnings,
    Detokenize,
    Detokenized,
    EncodedPrompt,
    EncodedSubmit,
    EncodedTokenize,
    FromEngine,
    Hello,
    MetricFamily,
    Metrics,
    Parted,
    Prompt,
    Refused,
    Retained,
    StepOutputs,
    ToEngine,
    Tokenized,
    Warnings,
    body_length,
    decode_reply,
    encode,
    encode_part,
)
from kvtier.errors import (
    AnswerFailed,
    EngineAway,
    EngineStopped,
    InvalidGrammar,
    InvalidParameter,
    KvtierError,
    PromptTooLong,
    RemoteProtocolError,
)
from kvtier.observe.recent_warnings import LoggedWarning
from kvtier.tiers.parting import Parting
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_METRICS_TIMEOUT_S = 2.0
_EXPLAIN_TIMEOUT_S = 20.0
_RETENTION_TIMEOUT_S = 2.0
_READ_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """How often an engine is asked for a sign of life, and how long it may then say nothing at all."""

    ask_every_s: float = 5.0
    hung_after_s: float = 10.0


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for an engine, with the encoded `SamplingParams` of its `num_answers` answers.

    `kvtier explain` knows it by `request_id`; prompts share blocks if their `salt` is equal. Clients take
    turns at an engine. Prompts of one `session` are compared with each other, and with `explains` the engine says where
    this one parts from them. One that `warms` is asked for the cache's sake. With `retention` the engine says
    what of the prompt stays cached.
    """

    prompt: Prompt | EncodedPrompt
    params: msgspec.Raw
    num_answers: int
    request_id: str
    salt: str = ""
    client: str = ""
    session: str = ""
    explains: bool = False
    warms: bool = False
    retention: Sequence[RetentionAsk] = ()


class Answers:
    """The answers to one prompt as they grow: iterate over `pieces`, and `close` in any case.

    `token_bytes` are those of all tokens in the logprobs of pieces that came.
    """

    def __init__(
        self,
        connection: EngineConnection,
        number: int,
        num_answers: int,
        request_id: str = "",
        *,
        asks_retention: bool = False,
    ) -> None:
        self.num_answers = num_answers
        self.request_id = request_id
        self.engine = connection.name
        self.prompt_tokens = 0
        self.prompt_end = ""
        self.token_bytes: Mapping[int, bytes] = connection.token_bytes
        self._connection = connection
        self._number = number
        self._num_left = num_answers
        self._max_unread = max(MAX_UNREAD_PIECES, UNREAD_PIECES_PER_ANSWER * num_answers)
        self._came: asyncio.Queue[Accepted | StreamPiece | KvtierError] = asyncio.Queue()
        self._parting: Parting | None = None
        self._is_explained = asyncio.Event()
        self._outcomes: list[RetentionOutcome] = []
        self._is_retained = asyncio.Event()
        if not asks_retention:
            self._is_retained.set()

    async def pieces(self, first_choice: int = 0) -> AsyncGenerator[tuple[int, StreamPiece], None]:
        """Until all answers are complete, each piece with the number of its answer, counted from `first_choice`.

        Raises `EngineAway` when the engine dies meanwhile.
        """
        while self._num_left:
            piece = await self._next()
            assert isinstance(piece, StreamPiece)
            if piece.completion is not None:
                self._num_left -= 1
            yield first_choice + piece.index, piece

    def close(self) -> None:
        """The client wants no more: the engine stops computing, unless it is done, and frees the blocks."""
        self._connection.forget(self._number, is_over=not self._num_left)
        self._num_left = 0

    def put(self, reply: Accepted | StreamPiece | KvtierError) -> None:
        """For a client that does not read, no more is kept or computed."""
        self._came.put_nowait(reply)
        if self._came.qsize() > self._max_unread:
            self._came.put_nowait(AnswerFailed("the answer was not read as fast as it came"))
            self._connection.forget(self._number, is_over=False)

    async def parting(self) -> Parting | None:
        """Where the prompt parted, for a question that asked for it; None if that is not known, or not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXPLAIN_TIMEOUT_S):
                await self._is_explained.wait()
        return self._parting

    def explain(self, parting: Parting | None) -> None:
        self._parting = parting
        self._is_explained.set()

    async def retention(self) -> list[RetentionOutcome]:
        """What was to stay cached of the prompt, and what does; empty if nobody asked, or no answer came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETENTION_TIMEOUT_S):
                await self._is_retained.wait()
        return self._outcomes

    def retain(self, outcomes: list[RetentionOutcome]) -> None:
        self._outcomes = outcomes
        self._is_retained.set()

    async def accepted(self) -> None:
        """Wait until the engine has the prompt in its queue. Raises what is wrong with it."""
        reply = await self._next()
        assert isinstance(reply, Accepted)
        self.prompt_tokens = reply.prompt_tokens
        self.prompt_end = reply.prompt_end

    async def _next(self) -> Accepted | StreamPiece:
        reply = await self._came.get()
        if isinstance(reply, KvtierError):
            self._num_left = 0
            raise reply
        return reply


class EngineConnection:
    """`hello` is what the engine said of itself, None while it is away. `token_bytes` are those of tokens it named.

    `is_hung` while it is there and says nothing, whatever it is asked: its process is stopped, or worse. `loading_off`
    says why it loads nothing from its tiers, if so: it was asked a few seconds ago.
    """

    def __init__(self, name: str, socket_path: str, patience: Patience = DEFAULT_PATIENCE) -> None:
        self.name = name
        self.hello: Hello | None = None
        self.token_bytes: dict[int, bytes] = {}
        self.is_hung = False
        self.loading_off = ""
        self._patience = patience
        self._heard = asyncio.Event()
        self._socket_path = socket_path
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}
        self._looks: dict[int, asyncio.Future[Metrics | Parted | Warnings]] = {}
        self._tokenizing: dict[int, asyncio.Future[Tokenized | Detokenized]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._answers)

    def start(self) -> None:
        """Connect, now and whenever the connection is lost."""
        self._task = asyncio.create_task(self._run(), name=f"kvtier-connection-{self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def submit(self, question: Question) -> Answers:
        """Hand a prompt over, once the socket has room for it, and wait until it is in the engine's queue.

        Raises a `RequestError` when it cannot be served as asked, `EngineAway` when the engine is not there.
        """
        number = next(self._numbers)
        answers = Answers(
            self, number, question.num_answers, question.request_id, asks_retention=bool(question.retention)
        )
        prompt = question.prompt
        async with self._sending:  # in order, and one after the other: each waits until the one before has left
            await self._drain()
            encoded = _encoded(prompt)
            self._send(
                EncodedSubmit(
                    number,
                    question.request_id,
                    encoded,
                    question.params,
                    question.salt,
                    question.client,
                    question.session,
                    question.explains,
                    question.warms,
                    question.retention,
                )
            )
        self._answers[number] = answers
        try:
            await answers.accepted()
        except BaseException:  # the client may have gone
            answers.close()
            raise
        return answers

    async def tokenize(self, prompt: Prompt | EncodedPrompt, *, with_texts: bool = False) -> Tokenized:
        """The tokens of a prompt, as the engine's tokenizer and chat template make them. Raises as `submit` does."""
        reply = await self._ask(EncodedTokenize(next(self._numbers), _encoded(prompt), with_texts))
        assert isinstance(reply, Tokenized)
        return reply

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens. Raises as `submit` does."""
        reply = await self._ask(Detokenize(next(self._numbers), token_ids, skip_special_tokens))
        assert isinstance(reply, Detokenized)
        return reply.text

    async def _ask(self, question: EncodedTokenize | Detokenize) -> Tokenized | Detokenized:
        reply: asyncio.Future[Tokenized | Detokenized] = asyncio.get_running_loop().create_future()
        async with self._sending:
            await self._drain()
            self._send(question)
        self._tokenizing[question.number] = reply
        try:
            return await reply
        finally:
            self._tokenizing.pop(question.number, None)

    def forget(self, number: int, *, is_over: bool) -> None:
        """Stop reading what arrives for this number."""
        if self._answers.pop(number, None) is not None and not is_over:
            with contextlib.suppress(EngineAway):
                self._send(Abort(number))

    def break_off(self, sentence: str) -> None:
        """Answers in flight end with `EngineStopped`; their readers close them, which tells the engine."""
        for answers in list(self._answers.values()):
            answers.put(EngineStopped(sentence))

    async def metrics(self) -> list[MetricFamily]:
        """What the engine counts; nothing while it is away, hung, or does not answer."""
        reply = await self._look(AskMetrics(next(self._numbers)))
        return reply.families if isinstance(reply, Metrics) else []

    async def warnings(self) -> list[LoggedWarning]:
        """The last warnings of the engine's log; nothing while it is away, hung, or does not answer."""
        reply = await self._look(AskWarnings(next(self._numbers)))
        return reply.warnings if isinstance(reply, Warnings) else []

    async def parting(self, request_id: str) -> Parting | None:
        """Where a request's prompt parted; None if the engine does not know, or does not answer."""
        reply = await self._look(AskParting(next(self._numbers), request_id), _EXPLAIN_TIMEOUT_S)
        return reply.parting if isinstance(reply, Parted) else None

    async def _look(
        self, question: AskMetrics | AskParting | AskWarnings, timeout_s: float = _METRICS_TIMEOUT_S
    ) -> Metrics | Parted | Warnings | None:
        """What the engine says of itself; None while it is away, hung, or does not answer."""
        if self.is_hung:
            return None
        reply: asyncio.Future[Metrics | Parted | Warnings] = asyncio.get_running_loop().create_future()
        self._looks[question.number] = reply
        try:
            self._send(question)
            return await asyncio.wait_for(reply, timeout_s)
        except (EngineAway, TimeoutError):
            return None
        finally:
            del self._looks[question.number]

    async def _drain(self) -> None:
        """Until the engine has read most of what was sent."""
        if self._writer is not None:
            try:
                await self._writer.drain()
            except OSError as error:
                raise EngineAway(f"the engine {self.name} is starting") from error

    def _send(self, message: ToEngine | EncodedSubmit | EncodedTokenize) -> None:
        if self._writer is None or self.hello is None or self._writer.is_closing():
            raise EngineAway(f"the engine {self.name} is starting")
        self._writer.write(encode(message))

    async def _run(self) -> None:
        while True:
            try:
                await self._talk()
            except (OSError, asyncio.IncompleteReadError):
                pass  # it is not there, or not there any more
            except RemoteProtocolError as error:
                logger.error("engine %s: %s", self.name, error)
            finally:
                self._lose()
            await asyncio.sleep(_RETRY_S)

    async def _talk(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._socket_path, limit=_READ_LIMIT_BYTES)
        self._heard.clear()
        watching = asyncio.create_task(self._watch(), name=f"kvtier-watch-{self.name}")
        try:
            while True:
                body = await reader.readexactly(body_length(await reader.readexactly(LENGTH_BYTES)))
                self._heard.set()
                self._take(decode_reply(body))
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Ask for its metrics now and then: whatever it says meanwhile is a sign of life."""
        await self._heard.wait()  # until its `Hello` it is starting
        with contextlib.suppress(EngineAway):
            while True:
                await asyncio.sleep(self._patience.ask_every_s)
                self._heard.clear()
                self._send(AskMetrics(next(self._numbers)))
                try:
                    await asyncio.wait_for(self._heard.wait(), self._patience.hung_after_s)
                except TimeoutError:
                    await self._outwait_silence()

    async def _outwait_silence(self) -> None:
        self.is_hung = True
        logger.error("engine %s is hung: it says nothing, with %d requests", self.name, len(self._answers))
        await self._heard.wait()
        self.is_hung = False
        logger.info("engine %s answers again", self.name)

    def _take(self, reply: FromEngine) -> None:
        if isinstance(reply, StepOutputs):
            self.token_bytes |= reply.token_bytes
            for number, piece in reply.pieces:
                self._put(number, piece)
        elif isinstance(reply, Accepted):
            self._put(reply.number, reply)
        elif isinstance(reply, Parted) and reply.number in self._answers:
            self._answers[reply.number].explain(reply.parting)
        elif isinstance(reply, (Metrics, Parted, Warnings)):
            if isinstance(reply, Metrics):
                self.loading_off = reply.loading_off
            look = self._looks.get(reply.number)
            if look is not None and not look.done():
                look.set_result(reply)
        elif isinstance(reply, Retained):
            answers = self._answers.get(reply.number)
            if answers is not None:
                answers.retain(reply.outcomes)
        elif isinstance(reply, Refused):
            self._refuse(reply.number, _error_of(reply))
        elif isinstance(reply, (Tokenized, Detokenized)):
            tokenizing = self._tokenizing.get(reply.number)
            if tokenizing is not None and not tokenizing.done():
                tokenizing.set_result(reply)
        else:
            self.hello = reply
            logger.info("engine %s is there", self.name)

    def _refuse(self, number: int, error: KvtierError) -> None:
        tokenizing = self._tokenizing.get(number)
        if tokenizing is None:
            self._put(number, error)
        elif not tokenizing.done():
            tokenizing.set_exception(error)

    def _put(self, number: int, reply: Accepted | StreamPiece | KvtierError) -> None:
        answers = self._answers.get(number)
        if answers is not None:  # otherwise its caller is gone
            answers.put(reply)

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.hello is not None:
            logger.warning("engine %s is gone, with %d requests", self.name, len(self._answers))
            self.hello = None
        self.is_hung = False
        self.loading_off = ""
        for answers in self._answers.values():
            answers.explain(None)
            answers.retain([])
            answers.put(EngineAway(f"the engine {self.name} stopped before the answer was complete"))
        self._answers.clear()
        for number in list(self._tokenizing):
            self._refuse(number, EngineAway(f"the engine {self.name} stopped before it had answered"))


def _encoded(prompt: Prompt | EncodedPrompt) -> msgspec.Raw:
    return prompt.encoded if isinstance(prompt, EncodedPrompt) else msgspec.Raw(encode_part(prompt))


def _error_of(refused: Refused) -> KvtierError:
    kinds: dict[str, type[KvtierError]] = {
        TOO_LONG: PromptTooLong,
        INVALID: InvalidParameter,
        GRAMMAR: InvalidGrammar,
        FAILED: AnswerFailed,
    }
    return kinds.get(refused.reason, EngineStopped)(refused.sentence)
