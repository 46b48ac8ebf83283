"""The engine for servers: any thread submits, streams and aborts; one thread of the client's own does the steps.

Requests and aborts reach that thread through a queue; what it computes reaches the callers through a queue each. When
the engine fails, every stream ends with that error, and so does every later submission.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvtier.engine.answer import Completion, completion_of
from kvtier.engine.engine import Engine, Progress
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import EngineStopped, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What came for answer `index`: new tokens and text, and at its end the whole completion."""

    index: int
    token_ids: list[int]
    text: str
    completion: Completion | None


class AnswerStream:
    """The answers to one prompt as they grow. Iterate in one thread; `abort` from any."""

    def __init__(self, request_id: str, num_answers: int, abort: Callable[[AnswerStream], None]) -> None:
        self.request_id = request_id
        self._num_left = num_answers
        self._pieces: queue.SimpleQueue[StreamPiece | Exception] = queue.SimpleQueue()
        self._abort = abort

    def __iter__(self) -> Iterator[StreamPiece]:
        while self._num_left:
            piece = self._pieces.get()
            if isinstance(piece, Exception):
                self._num_left = 0
                raise piece
            if piece.completion is not None:
                self._num_left -= 1
            yield piece

    def abort(self) -> None:
        """End it; iterating ends with what was computed, and the reason "abort"."""
        self._abort(self)

    def wait(self) -> list[Completion]:
        """All answers, in order, once they are complete."""
        done = [piece.completion for piece in self if piece.completion is not None]
        return sorted(done, key=lambda completion: completion.index)

    def put(self, piece: StreamPiece | Exception) -> None:
        """Called by the engine's thread."""
        self._pieces.put(piece)


@dataclass(frozen=True, slots=True)
class _Submission:
    stream: AnswerStream
    prompt: str | Sequence[int]
    params: SamplingParams


class EngineClient:
    """Owns the thread that owns the engine. `close` ends both."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[_Submission | AnswerStream | None] = queue.SimpleQueue()
        self._streams: dict[str, AnswerStream] = {}
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AnswerStream:
        """Queue a prompt. What is wrong with it comes as the stream's error, a `RequestError`.

        Raises `EngineStopped` when the engine has failed or was closed.
        """
        params = params or SamplingParams()
        request_id = request_id or f"request-{next(self._numbers)}"
        stream = AnswerStream(request_id, params.n, self._inbox.put)
        with self._lock:
            if self._failure is not None or self._is_closed:
                raise EngineStopped(str(self._failure or "the engine was closed"))
            self._inbox.put(_Submission(stream, prompt, params))
        self._engine.wake()
        return stream

    def close(self) -> None:
        """Abort what is under way and end the thread."""
        with self._lock:
            self._is_closed = True
        self._inbox.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._pass_on(self._engine.step())
            stopped = EngineStopped("the engine was closed")
            for request_id in self._streams:
                self._engine.abort(request_id)
                self._engine.forget(request_id)
        except Exception as error:
            logger.exception("the engine failed")
            stopped = EngineStopped(f"the engine has stopped: {error}")
        self._engine.close()
        with self._lock:
            self._failure = stopped
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Submission):
                item.stream.put(stopped)
        for stream in self._streams.values():
            stream.put(stopped)

    def _read_inbox(self) -> bool:
        """Take in what waits; wait for something when there is nothing to do. False at the end."""
        while True:
            try:
                item = self._inbox.get(block=not self._engine.has_requests)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, _Submission):
                self._add(item)
            elif self._streams.get(item.request_id) is item:  # neither over nor refused
                self._pass_on(self._engine.abort(item.request_id))

    def _add(self, submission: _Submission) -> None:
        stream = submission.stream
        try:
            self._engine.add(stream.request_id, submission.prompt, submission.params)
        except RequestError as error:
            stream.put(error)
            return
        except Exception as error:
            stream.put(EngineStopped(f"the engine has stopped: {error}"))
            raise
        self._streams[stream.request_id] = stream

    def _pass_on(self, news: list[Progress]) -> None:
        """To each stream what came for it; prompts whose answers are all complete are forgotten afterwards."""
        for one in news:
            request = one.request
            completion = completion_of(request, self._engine.text_of(request)) if one.is_finished else None
            self._streams[request.group].put(StreamPiece(request.index, one.token_ids, one.text, completion))
        for request_id in {one.request.group for one in news if one.is_finished}:
            if all(request.finish_reason is not None for request in self._engine.requests_of(request_id)):
                del self._streams[request_id]
                self._engine.forget(request_id)
