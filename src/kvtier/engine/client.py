"""The engine for servers: any thread submits, streams and aborts; one thread of the client's own does the steps.

Requests and aborts reach that thread through a queue. What it computes reaches the callers through their sinks, one
call per step and sink; an `AnswerStream` is the sink of whoever names none. A request at which the engine fails ends
alone, with `AnswerFailed` or the reason "error". When the device computes nothing any more, every request ends with
that error, and every later submission is refused with it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, overload

from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.engine import Engine, StepOutput
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineStopped, RequestError
from kvtier.observe.log_limit import LogLimit

logger = logging.getLogger(__name__)

_SETTLING_LOOK_S = 0.02
"""So long may a prompt that comes while nothing but stores is under way wait for its turn."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine has taken a prompt in: it waits for its turn, or is being computed."""

    prompt_tokens: int


News = Admitted | StreamPiece | Exception
"""Of one request: `Admitted` comes first, unless it is refused. An exception, or the last completion, is the end."""


class PieceSink(Protocol):
    """Where news of requests go. One sink may serve many requests whose ids are all different."""

    def put(self, news: Sequence[tuple[str, News]]) -> None:
        """All that a step brought for this sink, with the requests' ids. The engine's thread calls it: never wait.

        When it raises, that is logged and all requests of the sink are aborted; nothing more is put.
        """
        ...


class Submission:
    """A prompt that was handed to the engine. Any thread."""

    def __init__(self, request_id: str, abort: Callable[[Submission], None]) -> None:
        self.request_id = request_id
        self._abort = abort

    def abort(self) -> None:
        """End it: what was computed comes with the reason "abort". Does nothing for one that is over."""
        self._abort(self)


class AnswerStream(Submission):
    """The answers to one prompt as they grow. Iterate in one thread; `abort` from any."""

    def __init__(self, request_id: str, num_answers: int, abort: Callable[[Submission], None]) -> None:
        super().__init__(request_id, abort)
        self._num_left = num_answers
        self._pieces: queue.SimpleQueue[StreamPiece | Exception] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[StreamPiece]:
        while self._num_left:
            piece = self._pieces.get()
            if isinstance(piece, Exception):
                self._num_left = 0
                raise piece
            if piece.completion is not None:
                self._num_left -= 1
            yield piece

    def wait(self) -> list[Completion]:
        """All answers, in order, once they are complete."""
        done = [piece.completion for piece in self if piece.completion is not None]
        return sorted(done, key=lambda completion: completion.index)

    def put(self, news: Sequence[tuple[str, News]]) -> None:
        """Called by the engine's thread."""
        for _, one in news:
            if not isinstance(one, Admitted):
                self._pieces.put(one)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What `submit` hands over; `prompt` is an error when it could not be encoded."""

    submission: Submission
    sink: PieceSink
    prompt: Sequence[int] | RequestError
    params: SamplingParams
    salt: str
    client: str


@dataclass(frozen=True, slots=True)
class _Settling:
    """Somebody waits until everything is stored."""

    deadline: float
    is_settled: Future[bool] = field(default_factory=Future)


class EngineClient:
    """Owns the thread that owns the engine. `close` ends both."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[_Arrival | Submission | _Settling | None] = queue.SimpleQueue()
        self._served: dict[str, tuple[Submission, PieceSink]] = {}
        self._settlings: list[_Settling] = []
        self._num_requests = 0
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._settle_s = 0.0
        self._log_limit = LogLimit(logger)
        self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """Its thread owns it: others read what does not change, and call `encode`."""
        return self._engine

    @property
    def failure(self) -> Exception | None:
        """Why nothing is served any more, a close among the reasons; None while the engine works. Any thread."""
        return self._failure

    @property
    def num_requests(self) -> int:
        """Prompts that were submitted and are not over. Any thread."""
        return self._num_requests

    @overload
    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
        client: str = "",
        sink: None = None,
    ) -> AnswerStream: ...

    @overload
    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
        client: str = "",
        sink: PieceSink,
    ) -> Submission: ...

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
        client: str = "",
        sink: PieceSink | None = None,
    ) -> Submission:
        """Queue a prompt; text is encoded here, in the caller's thread. Prompts share blocks if their `salt` is equal.

        Where many wait, clients take turns: `client` is whoever asked; without one each request is a client.
        What is wrong with it comes as the stream's error, or as news to the sink: a `RequestError`, by the engine's
        thread like everything else; a sink may hear of the request before this returns. Raises `EngineStopped` when
        the engine has failed or was closed.
        """
        params = params or SamplingParams()
        request_id = request_id or f"request-{next(self._numbers)}"
        submission: Submission
        if sink is None:
            submission = sink = AnswerStream(request_id, params.n, self._inbox.put)
        else:
            submission = Submission(request_id, self._inbox.put)
        tokens: Sequence[int] | RequestError
        try:
            tokens = self._engine.encode(prompt) if isinstance(prompt, str) else prompt
        except RequestError as error:
            tokens = error
        with self._lock:
            if self._failure is not None or self._is_closed:
                raise EngineStopped(str(self._failure or "the engine was closed"))
            self._num_requests += 1
            self._inbox.put(_Arrival(submission, sink, tokens, params, salt, client))
        self._engine.wake()
        return submission

    def settle(self, timeout_s: float) -> bool:
        """Wait until no request is under way and all that was offered to the engine's tiers is stored. Any thread.

        False when that takes too long, and after the engine has failed or was closed.
        """
        settling = _Settling(time.monotonic() + timeout_s)
        with self._lock:
            if self._failure is not None or self._is_closed:
                return False
            self._inbox.put(settling)
        self._engine.wake()
        try:
            return settling.is_settled.result(timeout_s)
        except TimeoutError:
            return False

    def close(self, settle_s: float = 0.0) -> None:
        """Abort what is under way and end the thread; for up to `settle_s` seconds, first store what was computed."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._settle_s = settle_s
                self._inbox.put(None)
        self._engine.wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- private: the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._pass_on(self._engine.step())
            stopped = EngineStopped("the engine was closed")
            for request_id in self._served:
                self._engine.abort(request_id)
                self._engine.forget(request_id)
        except Exception as error:
            logger.exception("the engine failed")
            stopped = EngineStopped(f"the engine has stopped: {error}")
        with self._lock:
            self._failure = stopped
        self._refuse_all(stopped)
        if self._settle_s > 0:
            self._engine.transfer.settle(self._settle_s)
        self._engine.close()

    def _refuse_all(self, stopped: EngineStopped) -> None:
        """Nothing comes any more, neither for those who are served nor for those who wait."""
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Arrival):
                self._put(item.sink, [(item.submission.request_id, stopped)])
            elif isinstance(item, _Settling):
                self._settlings.append(item)
        for settling in self._settlings:
            settling.is_settled.set_result(False)
        news: dict[PieceSink, list[tuple[str, News]]] = {}
        for request_id, (_, sink) in self._served.items():
            news.setdefault(sink, []).append((request_id, stopped))
        self._served.clear()
        for sink, items in news.items():
            self._put(sink, items)
        with self._lock:
            self._num_requests = 0

    def _read_inbox(self) -> bool:
        """Take in what waits; wait for something when there is nothing to do. False at the end."""
        while True:
            is_idle = not self._engine.has_requests
            if is_idle:
                self._settle()
            holds_blocks = self._engine.holds_blocks
            try:
                item = self._inbox.get(block=is_idle and not self._settlings and not holds_blocks)
            except queue.Empty:
                if is_idle and not holds_blocks:
                    continue
                return True
            if item is None:
                return False
            if isinstance(item, _Arrival):
                self._add(item)
            elif isinstance(item, _Settling):
                self._settlings.append(item)
            elif item.request_id in self._served and self._served[item.request_id][0] is item:
                self._pass_on(self._engine.abort(item.request_id))

    def _settle(self) -> None:
        """Give stores a moment, if somebody waits for them."""
        if not self._settlings:
            return
        is_settled = self._engine.transfer.settle(_SETTLING_LOOK_S)
        now = time.monotonic()
        for settling in self._settlings:
            if is_settled or now >= settling.deadline:
                settling.is_settled.set_result(is_settled)
        self._settlings = [settling for settling in self._settlings if not settling.is_settled.done()]

    def _add(self, arrival: _Arrival) -> None:
        request_id = arrival.submission.request_id
        try:
            if isinstance(arrival.prompt, RequestError):
                raise arrival.prompt
            requests = self._engine.add(request_id, arrival.prompt, arrival.params, arrival.salt, client=arrival.client)
        except (RequestError, EngineStopped) as error:
            self._put(arrival.sink, [(request_id, error)])
            self._note_over()
            return
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self._log_limit.warning("add", "request %s could not be taken in: %s", request_id, trace)
            self._put(arrival.sink, [(request_id, AnswerFailed(f"the engine could not take the request in: {error}"))])
            self._note_over()
            return
        self._served[request_id] = (arrival.submission, arrival.sink)
        self._put(arrival.sink, [(request_id, Admitted(requests[0].prompt_tokens))])

    def _pass_on(self, outputs: Iterable[StepOutput]) -> None:
        """To each sink what came for it; prompts whose answers are all complete are forgotten afterwards."""
        news: dict[PieceSink, list[tuple[str, News]]] = {}
        finished = set()
        for request, piece in outputs:
            if piece.completion is not None:
                finished.add(request.group)
            news.setdefault(self._served[request.group][1], []).append((request.group, piece))
        for sink, items in news.items():
            self._put(sink, items)
        for request_id in finished & self._served.keys():
            if all(request.finish_reason is not None for request in self._engine.requests_of(request_id)):
                self._forget(request_id)

    def _put(self, sink: PieceSink, news: Sequence[tuple[str, News]]) -> None:
        try:
            sink.put(news)
        except Exception:
            logger.exception("news could not be handed over: the requests of that sink are aborted")
            for request_id in [one for one, (_, its) in self._served.items() if its is sink]:
                self._engine.abort(request_id)
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._served[request_id]
        self._engine.forget(request_id)
        self._note_over()

    def _note_over(self) -> None:
        with self._lock:
            self._num_requests -= 1
