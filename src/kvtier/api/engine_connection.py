"""The HTTP server's connection to one engine's process: a Unix socket that is reconnected whenever it is lost.

Runs in the server's event loop. When the connection is lost, all requests in flight end with `EngineAway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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
    AskUsedPrefixes,
    AskWarnings,
    Detokenize,
    Detokenized,
    EncodedPrompt,
    EncodedSubmit,
    EncodedTokenize,
    EngineHello,
    FromEngine,
    MetricFamily,
    Metrics,
    Parted,
    Prompt,
    Refused,
    Retained,
    StepOutputs,
    StopLoading,
    ToEngine,
    Tokenized,
    UsedPrefixes,
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

_Question = AskMetrics | AskParting | AskWarnings | AskUsedPrefixes
_Look = Metrics | Parted | Warnings | UsedPrefixes

_RETRY_S = 0.1
_METRICS_TIMEOUT_S = 2.0
_EXPLAIN_TIMEOUT_S = 20.0
_RETENTION_TIMEOUT_S = 2.0
_READ_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """How often an engine is probed, and after how long without any message it counts as hung."""

    ask_every_s: float = 5.0
    hung_after_s: float = 10.0


DEFAULT_PATIENCE = ProbeTimes()


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt for an engine, with the encoded `SamplingParams` of its `num_answers` answers.

    `request_id` is the id for `kvtier explain`; prompts with the same `salt` share blocks. An engine serves its clients
    (`client`) in turn. Prompts of one `session` are compared with each other; with `explains` the engine reports where
    this one parts from the others. `warms` marks a prompt that is only computed for the cache. With `retention` the
    engine reports which part of the prompt stays cached.
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
    """The answers to one prompt while they grow: iterate over `pieces`, and always `close`.

    `token_bytes` has the bytes of all tokens in the log-probabilities of pieces so far.
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
        self._replies: asyncio.Queue[Accepted | StreamPiece | KvtierError] = asyncio.Queue()
        self._parting: Parting | None = None
        self._is_explained = asyncio.Event()
        self._outcomes: list[RetentionOutcome] = []
        self._is_retained = asyncio.Event()
        if not asks_retention:
            self._is_retained.set()

    async def pieces(self, first_choice: int = 0) -> AsyncGenerator[tuple[int, StreamPiece], None]:
        """Pieces until all answers are complete, each with the number of its answer, counted from `first_choice`.

        Raises `EngineAway` if the engine dies.
        """
        while self._num_left:
            piece = await self._next()
            assert isinstance(piece, StreamPiece)
            if piece.completion is not None:
                self._num_left -= 1
            yield first_choice + piece.index, piece

    def close(self) -> None:
        """Stop: if answers are incomplete, the engine is told to abort them and to free their blocks."""
        self._connection.forget(self._number, is_over=not self._num_left)
        self._num_left = 0

    def put(self, reply: Accepted | StreamPiece | KvtierError) -> None:
        """Add a reply. If too many are unread, the answers are aborted."""
        self._replies.put_nowait(reply)
        if self._replies.qsize() > self._max_unread:
            self._replies.put_nowait(AnswerFailed("the client read the answer too slowly"))
            self._connection.forget(self._number, is_over=False)

    async def parting(self) -> Parting | None:
        """Where the prompt parted, if the question `explains`; None if unknown, or not reported in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXPLAIN_TIMEOUT_S):
                await self._is_explained.wait()
        return self._parting

    def explain(self, parting: Parting | None) -> None:
        self._parting = parting
        self._is_explained.set()

    async def retention(self) -> list[RetentionOutcome]:
        """Outcomes of the question's `retention`; empty if it has none, or if none was reported in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETENTION_TIMEOUT_S):
                await self._is_retained.wait()
        return self._outcomes

    def retain(self, outcomes: list[RetentionOutcome]) -> None:
        self._outcomes = outcomes
        self._is_retained.set()

    async def accepted(self) -> None:
        """Wait until the prompt is in the engine's queue. Raises the engine's error if it refuses the prompt."""
        reply = await self._next()
        assert isinstance(reply, Accepted)
        self.prompt_tokens = reply.prompt_tokens
        self.prompt_end = reply.prompt_end

    async def _next(self) -> Accepted | StreamPiece:
        reply = await self._replies.get()
        if isinstance(reply, KvtierError):
            self._num_left = 0
            raise reply
        return reply


class EngineConnection:
    """`hello` is the engine's description of itself, None while it is away. `token_bytes` has bytes by token id.

    `is_hung` while the engine is connected but does not answer, for example because its process is stopped.
    `loading_off` says why it loads nothing from its tiers, if so, as of the last probe a few seconds ago.
    `on_wrong_kv` is called, in the event loop, when that is news and the engine's own canary is why.
    """

    def __init__(self, name: str, socket_path: str, patience: ProbeTimes = DEFAULT_PATIENCE) -> None:
        self.name = name
        self.hello: EngineHello | None = None
        self.token_bytes: dict[int, bytes] = {}
        self.is_hung = False
        self.loading_off = ""
        self.on_wrong_kv: Callable[[EngineConnection], None] | None = None
        self._patience = patience
        self._heard = asyncio.Event()
        self._socket_path = socket_path
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}
        self._looks: dict[int, asyncio.Future[_Look]] = {}
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

    async def submit(self, question: PromptRequest) -> Answers:
        """Send a prompt, once the socket has room, and wait until it is in the engine's queue.

        Raises `RequestError` if it cannot be served, and `EngineAway` if the engine is not connected.
        """
        number = next(self._numbers)
        answers = Answers(
            self, number, question.num_answers, question.request_id, asks_retention=bool(question.retention)
        )
        prompt = question.prompt
        async with self._sending:  # in order: each prompt waits until the one before has been sent
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
        except BaseException:  # such as a cancellation, if the client has left
            answers.close()
            raise
        return answers

    async def tokenize(self, prompt: Prompt | EncodedPrompt, *, with_texts: bool = False) -> Tokenized:
        """The tokens of a prompt, by the engine's tokenizer and chat template. Raises as `submit`."""
        reply = await self._ask(EncodedTokenize(next(self._numbers), _encoded(prompt), with_texts))
        assert isinstance(reply, Tokenized)
        return reply

    async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens. Raises as `submit`."""
        reply = await self._ask(Detokenize(next(self._numbers), token_ids, skip_special_tokens))
        assert isinstance(reply, Detokenized)
        return reply.text

    def stop_loading(self, because: str) -> None:
        """Tell the engine to load nothing from its tiers; one that is away has forgotten what it had loaded anyway."""
        with contextlib.suppress(EngineAway):
            self._send(StopLoading(next(self._numbers), because))

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
        """Ignore further messages for this number; abort it at the engine unless it is over."""
        if self._answers.pop(number, None) is not None and not is_over:
            with contextlib.suppress(EngineAway):
                self._send(Abort(number))

    def cut_off(self, sentence: str) -> None:
        """End answers in flight with `EngineStopped`; their readers close them, which aborts them at the engine."""
        for answers in list(self._answers.values()):
            answers.put(EngineStopped(sentence))

    async def metrics(self) -> list[MetricFamily]:
        """The engine's metrics; empty while it is away, hung, or does not answer."""
        reply = await self._look(AskMetrics(next(self._numbers)))
        return reply.families if isinstance(reply, Metrics) else []

    async def warnings(self) -> list[LoggedWarning]:
        """The last warnings of the engine's log; empty while it is away, hung, or does not answer."""
        reply = await self._look(AskWarnings(next(self._numbers)))
        return reply.warnings if isinstance(reply, Warnings) else []

    async def used_prefixes(self, ends: bytes) -> list[tuple[bytes, int, float]]:
        """Prefixes that prompts began with since the last call, as in `UsedPrefixes`; then `ends` are counted."""
        reply = await self._look(AskUsedPrefixes(next(self._numbers), ends))
        return reply.uses if isinstance(reply, UsedPrefixes) else []

    async def parting(self, request_id: str) -> Parting | None:
        """Where a request's prompt parted; None if the engine does not know or does not answer."""
        reply = await self._look(AskParting(next(self._numbers), request_id), _EXPLAIN_TIMEOUT_S)
        return reply.parting if isinstance(reply, Parted) else None

    async def _look(self, question: _Question, timeout_s: float = _METRICS_TIMEOUT_S) -> _Look | None:
        """An answer about the engine itself; None while it is away, hung, or does not answer."""
        if self.is_hung:
            return None
        reply: asyncio.Future[_Look] = asyncio.get_running_loop().create_future()
        self._looks[question.number] = reply
        try:
            self._send(question)
            return await asyncio.wait_for(reply, timeout_s)
        except (EngineAway, TimeoutError):
            return None
        finally:
            del self._looks[question.number]

    async def _drain(self) -> None:
        """Wait until the engine has read most of what was sent."""
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
                pass  # the engine is not running, or has ended
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
        """Probe the engine by asking for its metrics; any message counts as a sign of life."""
        await self._heard.wait()  # before its `EngineHello` the engine is starting
        with contextlib.suppress(EngineAway):
            while True:
                await asyncio.sleep(self._patience.ask_every_s)
                self._heard.clear()
                self._send(AskMetrics(next(self._numbers)))
                try:
                    await asyncio.wait_for(self._heard.wait(), self._patience.hung_after_s)
                except TimeoutError:
                    await self._wait_while_hung()

    async def _wait_while_hung(self) -> None:
        self.is_hung = True
        logger.error("engine %s is hung: no answer, %d requests in flight", self.name, len(self._answers))
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
        elif isinstance(reply, (Metrics, Parted, Warnings, UsedPrefixes)):
            if isinstance(reply, Metrics):
                self._note_loading(reply)
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
            logger.info("engine %s is connected", self.name)

    def _note_loading(self, reply: Metrics) -> None:
        is_news = bool(reply.loading_off) and not self.loading_off
        self.loading_off = reply.loading_off
        if is_news and not reply.was_told and self.on_wrong_kv is not None:
            self.on_wrong_kv(self)

    def _refuse(self, number: int, error: KvtierError) -> None:
        tokenizing = self._tokenizing.get(number)
        if tokenizing is None:
            self._put(number, error)
        elif not tokenizing.done():
            tokenizing.set_exception(error)

    def _put(self, number: int, reply: Accepted | StreamPiece | KvtierError) -> None:
        answers = self._answers.get(number)
        if answers is not None:  # otherwise they have been closed
            answers.put(reply)

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.hello is not None:
            logger.warning("engine %s is gone, %d requests were in flight", self.name, len(self._answers))
            self.hello = None
        self.is_hung = False
        self.loading_off = ""
        for answers in self._answers.values():
            answers.explain(None)
            answers.retain([])
            answers.put(EngineAway(f"the engine {self.name} stopped before the answer was complete"))
        self._answers.clear()
        for number in list(self._tokenizing):
            self._refuse(number, EngineAway(f"the engine {self.name} stopped before it answered"))


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
