"""The view of a deployment for the page: the HTTP server's counts, its engines and the cache servers. One event loop.

One thread asks the cache servers; it starts with the first reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.api.engine_connection import EngineConnection
from kvtier.api.page.cache_levels import curve_of, namespaces_of, state_of, tiers_of, warnings_of
from kvtier.api.page.cache_reader import CacheReader
from kvtier.api.page.engine_numbers import EngineNumbers
from kvtier.api.page.moved_blocks import Move, MovedBlocks
from kvtier.api.page.moved_bytes import MovedBytes
from kvtier.api.page.view import CacheState, EngineState, Reading, ShownWarning, TierLevel
from kvtier.api.request_log import RequestLog
from kvtier.api.service import Service
from kvtier.api.token_history import TokenHistory
from kvtier.api.vllm.engine import VllmEngine
from kvtier.errors import ConfigError
from kvtier.observe.recent_warnings import LoggedWarning
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.parting import Parting

_Result = TypeVar("_Result")
_Stats = dict[str, object] | None
_MAX_WARNINGS = 100


class DeploymentView:
    """The view of `service`; runs in its event loop."""

    kind = "deployment"

    def __init__(self, service: Service) -> None:
        self._service = service
        page = service.config.page
        self._caches = [CacheReader(one.name, one.address) for one in (page.caches if page is not None else ())]
        self._moved_blocks = [MovedBlocks(one.name) for one in self._caches]
        self._moved_bytes = MovedBytes()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def log(self) -> RequestLog:
        return self._service.log

    @property
    def history(self) -> TokenHistory:
        return self._service.history

    @property
    def num_requests(self) -> int:
        return self._service.num_requests

    @property
    def prefix_changes(self) -> int:
        return self._service.prefixes.num_changes

    async def read(self) -> Reading:
        connections = self._service.engines.connections
        numbers = await asyncio.gather(*map(self._numbers, connections))
        stats = await self._stats()
        models = self._models_by_namespace()
        described = [
            namespaces_of(cache.name, one, models) for cache, one in zip(self._caches, stats, strict=True) if one
        ]
        curves = [curve_of(cache.name, one) for cache, one in zip(self._caches, stats, strict=True) if one]
        return Reading(
            status=self._status(),
            tiers=_device_tiers(connections, numbers) + self._cache_tiers(stats),
            engines=self._engines(numbers),
            caches=[_cache_state(cache, one) for cache, one in zip(self._caches, stats, strict=True)],
            namespaces=[one for found, _ in described for one in found],
            num_namespaces=sum(count for _, count in described),
            curves=[curve for curve in curves if curve is not None],
            moved=self._moved_by_engines(connections, numbers)
            | self._moved_by_caches(stats, has_engines=bool(numbers)),
            saved_s=sum(one.saved_s for one in numbers) if numbers else None,
            unvalued_tokens=round(sum(one.unvalued_tokens for one in numbers)),
        )

    async def warnings(self) -> list[ShownWarning]:
        """Warnings of all processes of the deployment that answer, newest first."""
        connections = self._service.engines.connections
        of_engines = await asyncio.gather(*(connection.warnings() for connection in connections))
        found = _shown("http", self._service.warnings.newest())
        for connection, own in zip(connections, of_engines, strict=True):
            found += _shown(connection.name, own)
        for cache, stats in zip(self._caches, await self._stats(), strict=True):
            found += warnings_of(cache.name, stats or {})
        return sorted(found, key=lambda one: one.at, reverse=True)[:_MAX_WARNINGS]

    async def explain(self, request_id: str, *, with_text: bool) -> dict[str, object] | None:
        logged = self.log.get(request_id)
        explanation = await self._noted(request_id)
        if logged is None and explanation is None:
            return None
        found: dict[str, object] = {"request_id": request_id, "request": logged}
        if explanation is not None:
            found |= {"sentence": explanation.sentence(), "ended_at_tokens": explanation.ended_at_tokens}
        parting = await self._parting(request_id, "" if logged is None else logged.engine)
        if parting is None and explanation is not None:
            parting = explanation.parting
        if parting is not None:
            shown = parting if with_text else parting.without_text()
            found |= {"parting": shown, "parting_sentence": shown.sentence(), "advice": shown.advice()}
        return found

    def rest(self) -> None:
        if self._thread is not None:
            for cache in self._caches:
                self._thread.submit(cache.close)

    def close(self) -> None:
        if self._thread is not None:
            self.rest()
            self._thread.shutdown()
            self._thread = None

    # --- engines ------------------------------------------------------------------------------------------------------

    async def _numbers(self, connection: EngineConnection) -> EngineNumbers:
        return EngineNumbers.of(await connection.metrics())

    def _status(self) -> str:
        if self._service.is_draining:
            return "stopping"
        return "ready" if self._service.is_ready else "starting"

    def _engines(self, numbers: Sequence[EngineNumbers]) -> list[EngineState]:
        engines = self._service.engines
        models = [model.name for model in engines.models for _ in model.connections]
        own = [
            _engine_state(connection, model, one)
            for connection, model, one in zip(engines.connections, models, numbers, strict=True)
        ]
        passed = self._service.vllm.models
        return own + [_vllm_state(engine, model.name) for model in passed for engine in model.engines]

    def _moved_by_engines(
        self, connections: Sequence[EngineConnection], numbers: Sequence[EngineNumbers]
    ) -> dict[Move, float]:
        for connection, one in zip(connections, numbers, strict=True):
            if one.is_known:
                self._moved_bytes.take(connection.name, one.moved)
        return self._moved_bytes.all()

    def _models_by_namespace(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for model in self._service.engines.models:
            for connection in model.connections:
                if connection.hello is not None:
                    names = found.setdefault(connection.hello.namespace, [])
                    if model.name not in names:
                        names.append(model.name)
        return found

    async def _parting(self, request_id: str, engine: str) -> Parting | None:
        connection = next((one for one in self._service.engines.connections if one.name == engine), None)
        return None if connection is None else await connection.parting(request_id)

    # --- cache servers ------------------------------------------------------------------------------------------------

    async def _stats(self) -> list[_Stats]:
        if not self._caches:
            return []
        return await self._in_thread(lambda: [cache.stats() for cache in self._caches])

    async def _noted(self, request_id: str) -> Explanation | None:
        if not self._caches:
            return None
        texts = await self._in_thread(lambda: [cache.noted(request_id) for cache in self._caches])
        try:
            return next((Explanation.from_json(text) for text in texts if text), None)
        except ConfigError:
            return None

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvtier-page")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _moved_by_caches(self, stats: Sequence[_Stats], *, has_engines: bool) -> dict[Move, float]:
        """kvtier's engines count the bytes of a server's memory themselves; engines of vLLM do not."""
        found: dict[Move, float] = {}
        for blocks, one in zip(self._moved_blocks, stats, strict=True):
            if one is not None:
                moved = blocks.take(one)
                found |= {move: nbytes for move, nbytes in moved.items() if move.tier != "memory" or not has_engines}
        return found

    def _cache_tiers(self, stats: Sequence[_Stats]) -> list[TierLevel]:
        found: list[TierLevel] = []
        for cache, one in zip(self._caches, stats, strict=True):
            away = [TierLevel(name="memory", owner=cache.name, is_up=False)]
            found += away if one is None else tiers_of(cache.name, one)
        return found


def _shown(source: str, warnings: Sequence[LoggedWarning]) -> list[ShownWarning]:
    return [ShownWarning(at=one.at, level=one.level, text=one.text, source=source) for one in warnings]


def _device_tiers(connections: Sequence[EngineConnection], numbers: Sequence[EngineNumbers]) -> list[TierLevel]:
    """The devices' own caches. What requests use at the moment counts as leased."""
    found = []
    for connection, one in zip(connections, numbers, strict=True):
        hello = connection.hello
        if hello is not None:
            block_bytes = hello.kv_bytes / one.num_blocks if one.num_blocks else 0.0
            found.append(
                TierLevel(
                    name="device",
                    owner=connection.name,
                    room_bytes=hello.kv_bytes,
                    used_bytes=round(block_bytes * one.held_blocks),
                    leased_bytes=round(block_bytes * one.used_blocks),
                    blocks=round(one.held_blocks),
                )
            )
    return found


def _engine_state(connection: EngineConnection, model: str, numbers: EngineNumbers) -> EngineState:
    hello = connection.hello
    if hello is None:
        return EngineState(name=connection.name, model=model, kind="kvtier", status="starting")
    return EngineState(
        name=connection.name,
        model=model,
        kind="kvtier",
        status="hung" if connection.is_hung else "ready",
        since=hello.started_at,
        device=hello.device,
        namespace=hello.namespace,
        running=round(numbers.running),
        waiting=round(numbers.waiting),
        loading_off=connection.loading_off,
        canary_checks=numbers.canary_checks,
    )


def _vllm_state(engine: VllmEngine, model: str) -> EngineState:
    since = None if engine.hello is None else engine.hello.since
    return EngineState(name=engine.name, model=model, kind="vllm", status=engine.status, since=since)


def _cache_state(cache: CacheReader, stats: _Stats) -> CacheState:
    if stats is None:
        return CacheState(name=cache.name, address=cache.address, status="away")
    return state_of(cache.name, cache.address, stats)
