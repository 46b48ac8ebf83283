"""A model that vLLM runs: which of its engines gets a request, and what happens when that engine dies.

The engine that has the longest beginning of a prompt gets the request, unless it is much busier than the least
busy one. If an engine dies before its answer has begun, the request goes to another engine, or waits until one starts.
An answer that has begun is not continued elsewhere: two engines do not compute the same bits, so a client could get
two halves of different answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.api.limits import FIRST_BYTE_S, HELD_ANSWER_BYTES, HOLD_S, MAX_LOST_ENGINES, UPSTREAM_SILENCE_S
from kvtier.api.vllm.engine import VllmEngine, VllmHello
from kvtier.api.vllm.exchange import Exchange, ExchangeError, Headers
from kvtier.api.vllm.prefix_keys import PrefixKey
from kvtier.api.vllm.prompt_feed import PromptFeed
from kvtier.api.vllm.seen_prefixes import SeenPrefixes
from kvtier.errors import AnswerFailed, EngineAway
from kvtier.observe.metrics import ApiMetrics
from kvtier.wire.prompt_news import prompt_id_in

_AFFINITY_SLACK = 4
"""An engine with this many more requests than the least busy one is passed over, even for a prompt that it has seen."""

_EVENT_STREAM = b"text/event-stream"
_ERROR_EVENT = (b'data: {"error"', b'data:{"error"', b"event: error")


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to send to an engine unchanged. `keys` are the prefix keys of its prompt, which the engine reports by
    `prompt_id`."""

    target: str
    headers: Headers
    body: Sequence[bytes]
    keys: Sequence[PrefixKey] = ()
    method: str = "POST"
    prompt_id: str = ""


class UpstreamAnswer:
    """An answer that has begun: `first` has its first bytes, `read` returns the rest. Must be closed.

    `is_whole` if nothing follows `first`.
    """

    def __init__(self, engine: VllmEngine, exchange: Exchange) -> None:
        self.engine = engine
        self.status = exchange.status
        self.headers = exchange.headers
        self.first = b""
        self.is_whole = False
        self._exchange = exchange
        self._cut_off = ""

    @property
    def is_event_stream(self) -> bool:
        return any(name == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in self.headers)

    async def read(self) -> bytes:
        """The next bytes; empty at the end. Raises `EngineAway` if the engine dies."""
        try:
            async with asyncio.timeout(UPSTREAM_SILENCE_S):
                return await self._exchange.read()
        except TimeoutError as error:
            raise EngineAway(f"the engine {self.engine.name} sent nothing for {UPSTREAM_SILENCE_S:g} s") from error
        except ExchangeError as error:
            sentence = self._cut_off or f"the engine {self.engine.name} stopped before the answer was complete"
            raise EngineAway(sentence) from error

    def cut_off(self, sentence: str) -> None:
        """Further reads raise `EngineAway` with this sentence."""
        self._cut_off = sentence
        self._exchange.cut_off(sentence)

    def close(self) -> None:
        """The client wants no more: the engine stops computing the answer if it is not complete."""
        self.abandon()
        self.engine.num_requests -= 1

    def abandon(self) -> None:
        """Close an answer that is not counted in `num_requests`."""
        self._exchange.close()


class VllmModel:
    """A model and its engines. The first of `names` is its main name; lists show the names in `listed`, or all."""

    hold_s = HOLD_S

    def __init__(
        self, names: Sequence[str], engines: Sequence[VllmEngine], metrics: ApiMetrics, listed: Sequence[str] = ()
    ) -> None:
        self.names = names
        self.listed_names = listed or names
        self.engines = engines
        self._records = {engine.name: SeenPrefixes() for engine in engines}
        self._feeds = [
            PromptFeed(engine.name, engine.prompts_path, self._records[engine.name])
            for engine in engines
            if engine.prompts_path
        ]
        self._metrics = metrics
        self._engine_up = asyncio.Event()
        self._starts: dict[str, int] = {}
        self._begun: weakref.WeakSet[UpstreamAnswer] = weakref.WeakSet()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def hello(self) -> VllmHello | None:
        """What its engines tell about the model; None while none of them has connected."""
        return next((engine.hello for engine in self.engines if engine.hello is not None), None)

    @property
    def max_model_len(self) -> int | None:
        return None if self.hello is None else self.hello.max_model_len

    def start(self) -> None:
        for engine in self.engines:
            engine.start()
        for feed in self._feeds:
            feed.start()

    async def close(self) -> None:
        for feed in self._feeds:
            await feed.close()
        for engine in self.engines:
            await engine.close()

    def note_up(self, engine: VllmEngine) -> None:
        """An engine has connected, or answers again. If its process is new, its cached prefixes are forgotten."""
        if self._starts.get(engine.name) != engine.num_starts:
            self._starts[engine.name] = engine.num_starts
            self._records[engine.name].clear()
            self._metrics.engine_starts.labels(engine=engine.name).inc()
        self._engine_up.set()
        self._engine_up = asyncio.Event()

    async def answer(self, request: UpstreamRequest) -> UpstreamAnswer:
        """Raises `EngineAway` if no engine is up in time, and `AnswerFailed` if several engines die computing this."""
        deadline = asyncio.get_running_loop().time() + self.hold_s
        num_lost = 0
        while True:
            engine = self._pick(request)
            if engine is None:
                await self._wait_for_engine(deadline)
                continue
            try:
                return await self._ask(engine, request)
            except ExchangeError as error:
                if engine.is_up and not await engine.is_well():
                    engine.suspect()
                num_lost += error.was_sent
                if num_lost >= MAX_LOST_ENGINES:
                    sentence = f"{num_lost} engines of {self.name} died while they computed this request"
                    raise AnswerFailed(sentence) from error
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineAway(f"the model {self.name} does not answer") from error
                self._metrics.retried_requests.labels(model=self.name).inc()

    async def answer_of(self, engine_name: str, request: UpstreamRequest) -> UpstreamAnswer | None:
        """The answer of this engine and no other; None if it is gone. Raises `EngineAway` if it is hung."""
        engine = next((one for one in self.engines if one.name == engine_name), None)
        if engine is None or engine.hello is None:
            return None
        if engine.is_hung:
            raise EngineAway(f"the engine {engine.name} does not answer")
        try:
            return await self._ask(engine, request)
        except ExchangeError:
            if engine.is_up and not await engine.is_well():
                engine.suspect()
            return None

    def note_response(self, engine_name: str, prompt_id: str, response_id: str) -> None:
        """An engine computes the request with this `prompt_id` as the response with this id."""
        new_id = prompt_id_in(response_id)
        if new_id is not None:
            self._records[engine_name].rename(prompt_id, new_id)

    def _pick(self, request: UpstreamRequest) -> VllmEngine | None:
        up = [engine for engine in self.engines if engine.is_up]
        if not up:
            return None
        limit = min(engine.num_requests for engine in up) + _AFFINITY_SLACK
        candidates = [engine for engine in up if engine.num_requests <= limit]
        found = {engine.name: self._records[engine.name].match(request.keys) for engine in candidates}
        best = min(candidates, key=lambda engine: (-found[engine.name], engine.num_requests, engine.num_asked))
        by = "prefix" if found[best.name] else "load"
        self._metrics.routed_requests.labels(model=self.name, by=by).inc()
        self._records[best.name].note(request.keys, request.prompt_id)
        return best

    async def _wait_for_engine(self, deadline: float) -> None:
        engine_up = self._engine_up
        if any(engine.is_up for engine in self.engines):
            return
        try:
            async with asyncio.timeout_at(deadline):
                await engine_up.wait()
        except TimeoutError as error:
            is_hung = any(engine.is_hung for engine in self.engines)
            state = "does not answer" if is_hung else "is starting"
            raise EngineAway(f"the model {self.name} {state}") from error

    async def _ask(self, engine: VllmEngine, request: UpstreamRequest) -> UpstreamAnswer:
        """Send a request and wait for the first bytes, or all of a short answer.

        Raises `ExchangeError` if the engine is lost.
        """
        engine.num_requests += 1
        engine.num_asked += 1
        self._metrics.engine_requests.labels(engine=engine.name).inc()
        answer: UpstreamAnswer | None = None
        try:
            answer = await _unless_lost(engine, request, lambda: any(one.is_up for one in self.engines))
            is_error = answer.status >= 500 or answer.first.startswith(_ERROR_EVENT)
            if is_error and not await engine.is_well():
                raise ExchangeError("the engine fails its health check", was_sent=True)
        except BaseException:  # also if the client is gone
            engine.num_requests -= 1
            if answer is not None:
                answer.abandon()
            raise
        self._begun.add(answer)
        return answer

    def cut_off(self, sentence: str) -> None:
        """End answers that have begun with `EngineAway`."""
        for answer in list(self._begun):
            answer.cut_off(sentence)


async def _unless_lost(engine: VllmEngine, request: UpstreamRequest, has_other: Callable[[], bool]) -> UpstreamAnswer:
    """The beginning of the answer. Raises `ExchangeError` if the engine dies, or takes too long.

    Raises it also if the engine hangs and another one can take the request; without another one, it is waited for.
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
            raise ExchangeError("the engine is gone or does not answer", was_sent=True)
        return working.result()
    except BaseException as error:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            (await working).abandon()  # the answer arrived just before the task was cancelled
        if isinstance(error, TimeoutError):
            raise ExchangeError(f"no answer within {FIRST_BYTE_S:g} s", was_sent=True) from error
        raise
    finally:
        losing.cancel()
        hanging.cancel()


async def _first_bytes(engine: VllmEngine, request: UpstreamRequest) -> UpstreamAnswer:
    """The first bytes of a stream; all or much of any other answer, so that until then the request can be retried."""
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
    """All models that vLLM runs."""

    def __init__(self, models: Sequence[VllmModel] = ()) -> None:
        self.models = models
        self._by_name = {name: model for model in models for name in model.names}

    @property
    def engines(self) -> list[VllmEngine]:
        return [engine for model in self.models for engine in model.engines]

    def start(self) -> None:
        for model in self.models:
            model.start()

    async def close(self) -> None:
        for model in self.models:
            await model.close()

    def cut_off(self, sentence: str) -> None:
        for model in self.models:
            model.cut_off(sentence)

    def get(self, name: str) -> VllmModel | None:
        return self._by_name.get(name)
