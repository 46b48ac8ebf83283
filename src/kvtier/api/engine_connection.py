"""One engine's process, as the HTTP server sees it: a Unix socket that is connected again whenever it was lost.

Everything runs in the server's event loop. When the engine is gone, whatever was asked of it ends with `EngineAway`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import msgspec

from kvtier.api.limits import MAX_UNREAD_PIECES, UNREAD_PIECES_PER_ANSWER
from kvtier.engine.answer import StreamPiece
from kvtier.engine.process.messages import (
    FAILED,
    INVALID,
    LENGTH_BYTES,
    TOO_LONG,
    Abort,
    Accepted,
    AskMetrics,
    EncodedPrompt,
    EncodedSubmit,
    FromEngine,
    Hello,
    MetricFamily,
    Metrics,
    Prompt,
    Refused,
    StepOutputs,
    ToEngine,
    body_length,
    decode_reply,
    encode,
    encode_part,
)
from kvtier.errors import (
    AnswerFailed,
    EngineAway,
    EngineStopped,
    InvalidParameter,
    KvtierError,
    PromptTooLong,
    RemoteProtocolError,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_METRICS_TIMEOUT_S = 2.0
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
    turns at an engine.
    """

    prompt: Prompt | EncodedPrompt
    params: msgspec.Raw
    num_answers: int
    request_id: str
    salt: str = ""
    client: str = ""


class Answers:
    """The answers to one prompt as they grow: iterate over `pieces`, and `close` in any case.

    `token_bytes` are those of all tokens in the logprobs of pieces that came.
    """

    def __init__(self, connection: EngineConnection, number: int, num_answers: int) -> None:
        self.num_answers = num_answers
        self.prompt_tokens = 0
        self.token_bytes: Mapping[int, bytes] = connection.token_bytes
        self._connection = connection
        self._number = number
        self._num_left = num_answers
        self._max_unread = max(MAX_UNREAD_PIECES, UNREAD_PIECES_PER_ANSWER * num_answers)
        self._came: asyncio.Queue[Accepted | StreamPiece | KvtierError] = asyncio.Queue()

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
        """Nobody wants more: the engine stops computing, unless it is done, and frees the blocks."""
        self._connection.forget(self._number, is_over=not self._num_left)
        self._num_left = 0

    def put(self, reply: Accepted | StreamPiece | KvtierError) -> None:
        """Of one who does not read, no more is kept, and no more computed."""
        self._came.put_nowait(reply)
        if self._came.qsize() > self._max_unread:
            self._came.put_nowait(AnswerFailed("the answer was not read as fast as it came"))
            self._connection.forget(self._number, is_over=False)

    async def accepted(self) -> None:
        """Wait until the engine has the prompt in its queue. Raises what is wrong with it."""
        reply = await self._next()
        assert isinstance(reply, Accepted)
        self.prompt_tokens = reply.prompt_tokens

    async def _next(self) -> Accepted | StreamPiece:
        reply = await self._came.get()
        if isinstance(reply, KvtierError):
            self._num_left = 0
            raise reply
        return reply


class EngineConnection:
    """`hello` is what the engine said of itself, None while it is away. `token_bytes` are those of tokens it named.

    `is_hung` while it is there and says nothing, whatever it is asked: its process is stopped, or worse.
    """

    def __init__(self, name: str, socket_path: str, patience: Patience = DEFAULT_PATIENCE) -> None:
        self.name = name
        self.hello: Hello | None = None
        self.token_bytes: dict[int, bytes] = {}
        self.is_hung = False
        self._patience = patience
        self._heard = asyncio.Event()
        self._socket_path = socket_path
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answers] = {}
        self._metrics: dict[int, asyncio.Future[list[MetricFamily]]] = {}
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
        answers = Answers(self, number, question.num_answers)
        prompt = question.prompt
        async with self._sending:  # in order, and one after the other: each waits until the one before has left
            await self._drain()
            encoded = prompt.encoded if isinstance(prompt, EncodedPrompt) else msgspec.Raw(encode_part(prompt))
            self._send(
                EncodedSubmit(number, question.request_id, encoded, question.params, question.salt, question.client)
            )
        self._answers[number] = answers
        try:
            await answers.accepted()
        except BaseException:  # whoever asked may have gone
            answers.close()
            raise
        return answers

    def forget(self, number: int, *, is_over: bool) -> None:
        """Nobody reads what comes for this number any more."""
        if self._answers.pop(number, None) is not None and not is_over:
            with contextlib.suppress(EngineAway):
                self._send(Abort(number))

    async def metrics(self) -> list[MetricFamily]:
        """What the engine counts; nothing while it is away, hung, or does not answer."""
        if self.is_hung:
            return []
        number = next(self._numbers)
        reply: asyncio.Future[list[MetricFamily]] = asyncio.get_running_loop().create_future()
        self._metrics[number] = reply
        try:
            self._send(AskMetrics(number))
            return await asyncio.wait_for(reply, _METRICS_TIMEOUT_S)
        except (EngineAway, TimeoutError):
            return []
        finally:
            del self._metrics[number]

    async def _drain(self) -> None:
        """Until the engine has read most of what was sent."""
        if self._writer is not None:
            try:
                await self._writer.drain()
            except OSError as error:
                raise EngineAway(f"the engine {self.name} is starting") from error

    def _send(self, message: ToEngine | EncodedSubmit) -> None:
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
        elif isinstance(reply, Refused):
            self._put(reply.number, _error_of(reply))
        elif isinstance(reply, Metrics):
            future = self._metrics.get(reply.number)
            if future is not None and not future.done():
                future.set_result(reply.families)
        else:
            self.hello = reply
            logger.info("engine %s is there", self.name)

    def _put(self, number: int, reply: Accepted | StreamPiece | KvtierError) -> None:
        answers = self._answers.get(number)
        if answers is not None:  # else nobody waits for it any more
            answers.put(reply)

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.hello is not None:
            logger.warning("engine %s is gone, with %d requests", self.name, len(self._answers))
            self.hello = None
        self.is_hung = False
        for answers in self._answers.values():
            answers.put(EngineAway(f"the engine {self.name} stopped before the answer was complete"))
        self._answers.clear()


def _error_of(refused: Refused) -> KvtierError:
    kinds: dict[str, type[KvtierError]] = {TOO_LONG: PromptTooLong, INVALID: InvalidParameter, FAILED: AnswerFailed}
    return kinds.get(refused.reason, EngineStopped)(refused.sentence)
