"""A model that vLLM runs: which of its engines gets a request, and what happens when that one dies.

The engine that has seen most of a prompt gets it, unless it is much busier than the idlest. A request whose answer
has not begun goes to another engine when its own dies, and waits for one that starts when there is none. An
answer that has begun is not continued elsewhere: two engines do not compute the same bits, so a client could get two
halves of different answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.api.limits import FIRST_BYTE_S, HELD_ANSWER_BYTES, HOLD_S, MAX_LOST_ENGINES, UPSTREAM_SILENCE_S
from kvtier.api.vllm.engine import VllmEngine, VllmFacts
from kvtier.api.vllm.exchange import Exchange, ExchangeError, Headers
from kvtier.api.vllm.prefix_keys import PrefixKey
from kvtier.api.vllm.prefix_record import PrefixRecord
from kvtier.errors import AnswerFailed, EngineAway
from kvtier.observe.metrics import ApiMetrics

_AFFINITY_SLACK = 4
"""An engine with this many more requests than the idlest one is passed over, even for a prompt it knows."""

_EVENT_STREAM = b"text/event-stream"
_ERROR_EVENT = (b'data: {"error"', b'data:{"error"', b"event: error")


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What is sent to an engine, as it is. `keys` are those of its prompt."""

    target: str
    headers: Headers
    body: Sequence[bytes]
    keys: Sequence[PrefixKey] = ()
    method: str = "POST"


class UpstreamAnswer:
    """An answer that has begun: `first` has its first bytes, `read` gives the rest. `close` in any case.

    `is_whole` when nothing follows `first`.
    """

    def __init__(self, engine: VllmEngine, exchange: Exchange) -> None:
        self.engine = engine
        self.status = exchange.status
        self.headers = exchange.headers
        self.first = b""
        self.is_whole = False
        self._exchange = exchange
        self._broken_off = ""

    @property
    def is_event_stream(self) -> bool:
        return any(name == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in self.headers)

    async def read(self) -> bytes:
        """More of it; empty at the end. Raises `EngineAway` when the engine dies meanwhile."""
        try:
            async with asyncio.timeout(UPSTREAM_SILENCE_S):
                return await self._exchange.read()
        except TimeoutError as error:
            raise EngineAway(f"the engine {self.engine.name} said nothing for {UPSTREAM_SILENCE_S:g} s") from error
        except ExchangeError as error:
            sentence = self._broken_off or f"the engine {self.engine.name} stopped before the answer was complete"
            raise EngineAway(sentence) from error

    def break_off(self, sentence: str) -> None:
        """Further reads raise `EngineAway` with this sentence."""
        self._broken_off = sentence
        self._exchange.break_off(sentence)

    def close(self) -> None:
        """The client wants no more: the engine stops computing, unless it is done."""
        self.abandon()
        self.engine.num_requests -= 1

    def abandon(self) -> None:
        """As `close`, of an answer that is not counted."""
        self._exchange.close()


class VllmModel:
    """A model by the names that clients call it, the first being its own. Lists show those in `listed`, or all."""

    hold_s = HOLD_S

    def __init__(
        self, names: Sequence[str], engines: Sequence[VllmEngine], metrics: ApiMetrics, listed: Sequence[str] = ()
    ) -> None:
        self.names = names
        self.listed_names = listed or names
        self.engines = engines
        self._record = PrefixRecord()
        self._metrics = metrics
        self._came = asyncio.Event()
        self._starts: dict[str, int] = {}
        self._begun: weakref.WeakSet[UpstreamAnswer] = weakref.WeakSet()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def facts(self) -> VllmFacts | None:
        """What its engines say of it; None while none of them has connected."""
        return next((engine.facts for engine in self.engines if engine.facts is not None), None)

    @property
    def max_model_len(self) -> int | None:
        return None if self.facts is None else self.facts.max_model_len

    def note_there(self, engine: VllmEngine) -> None:
        """An engine has connected, or answers again. What an earlier process of it had cached is gone."""
        if self._starts.get(engine.name) != engine.num_starts:
            self._starts[engine.name] = engine.num_starts
            self._record.forget(engine.name)
            self._metrics.engine_starts.labels(engine=engine.name).inc()
        self._came.set()
        self._came = asyncio.Event()

    async def answer(self, request: UpstreamRequest) -> UpstreamAnswer:
        """Raises `EngineAway` when no engine comes in time, and `AnswerFailed` when engines die of the request."""
        deadline = asyncio.get_running_loop().time() + self.hold_s
        num_lost = 0
        while True:
            engine = self._pick(request.keys)
            if engine is None:
                await self._wait_for_engine(deadline)
                continue
            try:
                return await self._ask(engine, request)
            except ExchangeError as error:
                if engine.is_there and not await engine.is_well():
                    engine.suspect()
                num_lost += error.was_sent
                if num_lost >= MAX_LOST_ENGINES:
                    sentence = f"{num_lost} engines of {self.name} died while they computed this request"
                    raise AnswerFailed(sentence) from error
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineAway(f"the model {self.name} does not answer") from error
                self._metrics.retried_requests.labels(model=self.name).inc()

    def _pick(self, keys: Sequence[PrefixKey]) -> VllmEngine | None:
        there = [engine for engine in self.engines if engine.is_there]
        if not there:
            return None
        limit = min(engine.num_requests for engine in there) + _AFFINITY_SLACK
        idle = [engine for engine in there if engine.num_requests <= limit]
        found = {engine.name: self._record.match(engine.name, keys) for engine in idle}
        best = min(idle, key=lambda engine: (-found[engine.name], engine.num_requests, engine.num_asked))
        by = "prefix" if found[best.name] else "load"
        self._metrics.routed_requests.labels(model=self.name, by=by).inc()
        self._record.note(best.name, keys)
        return best

    async def _wait_for_engine(self, deadline: float) -> None:
        came = self._came
        if any(engine.is_there for engine in self.engines):
            return
        try:
            async with asyncio.timeout_at(deadline):
                await came.wait()
        except TimeoutError as error:
            is_hung = any(engine.is_hung for engine in self.engines)
            state = "does not answer" if is_hung else "is starting"
            raise EngineAway(f"the model {self.name} {state}") from error

    async def _ask(self, engine: VllmEngine, request: UpstreamRequest) -> UpstreamAnswer:
        """Until the first bytes are here, or all of a short answer. Raises `ExchangeError` when the engine is lost."""
        engine.num_requests += 1
        engine.num_asked += 1
        self._metrics.engine_requests.labels(engine=engine.name).inc()
        answer: UpstreamAnswer | None = None
        try:
            answer = await _unless_lost(engine, request, lambda: any(one.is_there for one in self.engines))
            is_error = answer.status >= 500 or answer.first.startswith(_ERROR_EVENT)
            if is_error and not await engine.is_well():
                raise ExchangeError("the engine is not well", was_sent=True)
        except BaseException:  # also when the client is gone
            engine.num_requests -= 1
            if answer is not None:
                answer.abandon()
            raise
        self._begun.add(answer)
        return answer

    def break_off(self, sentence: str) -> None:
        """Answers that have begun end with `EngineAway`."""
        for answer in list(self._begun):
            answer.break_off(sentence)


async def _unless_lost(engine: VllmEngine, request: UpstreamRequest, has_other: Callable[[], bool]) -> UpstreamAnswer:
    """The beginning of the answer. Raises `ExchangeError` when the engine dies, or takes too long.

    Also when it hangs and another engine can take the request; where there is none, it may answer yet.
    """
    working = asyncio.ensure_future(_first_bytes(engine, request))
    losing = asyncio.ensure_future(engine.lost.wait())
    hanging = asyncio.ensure_future(engine.hung.wait())
    try:
        async with asyncio.timeout(FIRST_BYTE_S):
            await asyncio.wait({working, losing, hanging}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not losing.done() and not has_other():
                await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ExchangeError("the engine is gone, or does not answer", was_sent=True)
        return working.result()
    except BaseException as error:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            (await working).abandon()  # it arrived just after it was cancelled
        if isinstance(error, TimeoutError):
            raise ExchangeError(f"no answer within {FIRST_BYTE_S:g} s", was_sent=True) from error
        raise
    finally:
        losing.cancel()
        hanging.cancel()


async def _first_bytes(engine: VllmEngine, request: UpstreamRequest) -> UpstreamAnswer:
    """A stream's first bytes; of another answer all, or much of it, so that it can be asked for again until then."""
    exchange = await Exchange.send(engine.socket_path, request.method, request.target, request.headers, request.body)
    try:
        await exchange.head()
        answer = UpstreamAnswer(engine, exchange)
        pieces: list[bytes] = []
        while piece := await exchange.read():
            pieces.append(piece)
            if answer.is_event_stream or sum(map(len, pieces)) >= HELD_ANSWER_BYTES:
                break
        else:
            answer.is_whole = True
        answer.first = b"".join(pieces)
    except BaseException:
        exchange.close()
        raise
    return answer


class VllmModels:
    """All of them."""

    def __init__(self, models: Sequence[VllmModel] = ()) -> None:
        self.models = models
        self._by_name = {name: model for model in models for name in model.names}

    @property
    def engines(self) -> list[VllmEngine]:
        return [engine for model in self.models for engine in model.engines]

    def start(self) -> None:
        for engine in self.engines:
            engine.start()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()

    def break_off(self, sentence: str) -> None:
        for model in self.models:
            model.break_off(sentence)

    def get(self, name: str) -> VllmModel | None:
        return self._by_name.get(name)
