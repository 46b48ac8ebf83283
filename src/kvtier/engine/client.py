"""The engine for servers: any thread submits, streams and aborts; the client's own thread does the steps.

Requests and aborts reach that thread through a queue. Results reach the callers through their sinks, with one call per
step and sink; an `AnswerStream` is the default sink. A request at which the engine fails ends alone, with
`AnswerFailed` or the reason "error". If the device can compute nothing any longer, every request ends with that error,
and later submissions are refused with it.
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
from kvtier.engine.constraint.compiled import CompiledGrammar
from kvtier.engine.engine import Engine, StepOutput
from kvtier.engine.grammar import Grammar
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import AnswerFailed, EngineStopped, RequestError
from kvtier.observe.log_limit import LogLimit

logger = logging.getLogger(__name__)

_SETTLING_LOOK_S = 0.02
"""Longest delay for a prompt that arrives while only stores are running."""

_IDLE_S = 0.25
"""How long the engine must have been without requests before it works for itself."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine has accepted a prompt, which waits for its turn or is being computed."""

    prompt_tokens: int


StreamEvent = Admitted | StreamPiece | Exception
"""An event of a request. `Admitted` is the first, unless it is refused; an exception or the last completion ends it."""


class PieceSink(Protocol):
    """Where news of requests go. One sink may serve many requests, if their ids all differ."""

    def put(self, news: Sequence[tuple[str, StreamEvent]]) -> None:
        """All news of one step for this sink, with the requests' ids. Called by the engine's thread: must not wait.

        If it raises, the error is logged, all requests of the sink are aborted, and no more news is put.
        """
        ...


class Submission:
    """A prompt that was handed to the engine. Any thread."""

    def __init__(self, request_id: str, abort: Callable[[Submission], None]) -> None:
        self.request_id = request_id
        self._abort = abort

    def abort(self) -> None:
        """End it: tokens computed so far come with the reason "abort". Does nothing for a request that is over."""
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
        """Wait for all answers; returns them in order."""
        done = [piece.completion for piece in self if piece.completion is not None]
        return sorted(done, key=lambda completion: completion.index)

    def put(self, news: Sequence[tuple[str, StreamEvent]]) -> None:
        """Called by the engine's thread."""
        for _, one in news:
            if not isinstance(one, Admitted):
                self._pieces.put(one)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What `submit` hands over. `prompt` is an error if the prompt, or the grammar, cannot be used."""

    submission: Submission
    sink: PieceSink
    prompt: Sequence[int] | RequestError
    params: SamplingParams
    compiled: CompiledGrammar | None
    salt: str
    client: str
    warms: bool


@dataclass(frozen=True, slots=True)
class _Settling:
    """A `settle` call is waiting."""

    deadline: float
    is_settled: Future[bool] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Switching:
    """A `stop_loading` call, or without `off_because` a `resume_loading` call, is waiting."""

    off_because: str
    is_done: Future[None] = field(default_factory=Future)


class EngineClient:
    """Owns the thread that owns the engine. `close` ends both."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[_Arrival | Submission | _Settling | _Switching | None] = queue.SimpleQueue()
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
        """Owned by its thread: other threads only read what never changes, and call `encode`."""
        return self._engine

    @property
    def failure(self) -> Exception | None:
        """Why nothing is served any longer, such as a close; None while the engine works. Any thread."""
        return self._failure

    @property
    def loading_off(self) -> str:
        """Why nothing is loaded from the tiers; empty while loading is on. Any thread."""
        return self._engine.loading.off_because

    @property
    def was_told(self) -> bool:
        """`loading_off` came from another engine's canary. Any thread."""
        return self._engine.loading.was_told

    @property
    def num_requests(self) -> int:
        """Prompts that were submitted and are not over. Any thread."""
        return self._num_requests

    def has_compiled(self, grammar: Grammar) -> bool:
        """Whether a prompt with this grammar can be submitted without waiting for its compilation. Any thread."""
        return self.engine.grammars.find(grammar) is not None

    @overload
    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: str = "",
        client: str = "",
        warms: bool = False,
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
        warms: bool = False,
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
        warms: bool = False,
        sink: PieceSink | None = None,
    ) -> Submission:
        """Queue a prompt. Text is encoded, and a grammar compiled, in the caller's thread.

        Prompts share blocks if their `salt` is equal. A prompt that `warms` is for the tiers, as in `Engine.add`. If
        many prompts wait, clients take turns: `client` names the caller; without a name, each request is its own
        client. An invalid request is reported by the engine's thread, like everything else, as a `RequestError` of the
        stream or as news to the sink. A sink may get news of the request before this returns. Raises `EngineStopped` if
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
        compiled = None
        try:
            tokens = self._engine.encode(prompt) if isinstance(prompt, str) else prompt
            compiled = self._engine.compile(params)
        except RequestError as error:
            tokens = error
        with self._lock:
            if self._failure is not None or self._is_closed:
                raise EngineStopped(str(self._failure or "the engine was closed"))
            self._num_requests += 1
            self._inbox.put(_Arrival(submission, sink, tokens, params, compiled, salt, client, warms))
        self._engine.wake()
        return submission

    def settle(self, timeout_s: float) -> bool:
        """Wait until no request is running and everything offered to the engine's tiers is stored. Any thread.

        False on timeout, and after the engine has failed or was closed.
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

    def resume_loading(self) -> None:
        """Load from the tiers again if the canary had stopped that. Any thread; does nothing once closed."""
        self._switch(_Switching(""))

    def stop_loading(self, because: str) -> None:
        """Load nothing from the tiers: another engine's canary found wrong KV there. Any thread, like its opposite."""
        self._switch(_Switching(because))

    def _switch(self, switching: _Switching) -> None:
        with self._lock:
            if self._failure is not None or self._is_closed:
                return
            self._inbox.put(switching)
        self._engine.wake()
        switching.is_done.result()

    def close(self, settle_s: float = 0.0) -> None:
        """Abort all requests and end the thread; first store computed blocks, for up to `settle_s` seconds."""
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
        """End of the stream, for requests running or waiting."""
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Arrival):
                self._put(item.sink, [(item.submission.request_id, stopped)])
            elif isinstance(item, _Settling):
                self._settlings.append(item)
            elif isinstance(item, _Switching):
                item.is_done.set_result(None)
        for settling in self._settlings:
            settling.is_settled.set_result(False)
        news: dict[PieceSink, list[tuple[str, StreamEvent]]] = {}
        for request_id, (_, sink) in self._served.items():
            news.setdefault(sink, []).append((request_id, stopped))
        self._served.clear()
        for sink, items in news.items():
            self._put(sink, items)
        with self._lock:
            self._num_requests = 0

    def _read_inbox(self) -> bool:
        """Take in what is queued; wait if there is nothing to do. False at the end."""
        while True:
            is_idle = not self._engine.has_requests
            if is_idle:
                self._settle()
            holds_blocks = self._engine.holds_blocks
            may_wait = is_idle and not self._settlings and not holds_blocks
            has_idle_work = may_wait and self._engine.has_idle_work
            timeout_s = _IDLE_S if has_idle_work else None
            try:
                item = self._inbox.get(may_wait and not self._engine.is_checking, timeout_s)
            except queue.Empty:
                if has_idle_work:
                    self._engine.idle_step()
                if is_idle and not holds_blocks:
                    continue
                return True
            if item is None:
                return False
            self._take(item)

    def _take(self, item: _Arrival | _Settling | _Switching | Submission) -> None:
        if isinstance(item, _Arrival):
            self._add(item)
        elif isinstance(item, _Settling):
            self._settlings.append(item)
        elif isinstance(item, _Switching):
            if item.off_because:
                self._engine.stop_loading(item.off_because)
            else:
                self._engine.loading.resume()
            item.is_done.set_result(None)
        elif item.request_id in self._served and self._served[item.request_id][0] is item:
            self._pass_on(self._engine.abort(item.request_id))

    def _settle(self) -> None:
        """Give stores a moment, if a `settle` call waits for them."""
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
            requests = self._engine.add(
                request_id,
                arrival.prompt,
                arrival.params,
                arrival.salt,
                arrival.client,
                arrival.compiled,
                warms=arrival.warms,
            )
        except (RequestError, EngineStopped) as error:
            self._put(arrival.sink, [(request_id, error)])
            self._note_over()
            return
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self._log_limit.warning("add", "request %s could not be accepted: %s", request_id, trace)
            self._put(arrival.sink, [(request_id, AnswerFailed(f"the engine could not accept the request: {error}"))])
            self._note_over()
            return
        self._served[request_id] = (arrival.submission, arrival.sink)
        self._put(arrival.sink, [(request_id, Admitted(requests[0].prompt_tokens))])

    def _pass_on(self, outputs: Iterable[StepOutput]) -> None:
        """Hand each sink its news. Then forget the prompts whose answers are all complete."""
        news: dict[PieceSink, list[tuple[str, StreamEvent]]] = {}
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

    def _put(self, sink: PieceSink, news: Sequence[tuple[str, StreamEvent]]) -> None:
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
