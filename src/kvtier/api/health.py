"""`/health`, `/ready` and `/metrics`, for operators.

The first two need no API key. Metrics show each key's usage, so if there are keys, they need one with `metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier.api.engine_connection import EngineConnection
from kvtier.api.http_error import HttpError
from kvtier.api.limits import MAX_UPSTREAM_METRICS_BYTES
from kvtier.api.service import Service
from kvtier.api.vllm.engine import VllmEngine
from kvtier.api.vllm.exchange import ExchangeError
from kvtier.engine.process.messages import MetricFamily
from kvtier.errors import EngineAway

_METRICS_TIMEOUT_S = 10.0


def operation_routes(service: Service) -> list[Route]:
    def check_reader(request: Request) -> None:
        if not service.access.tenant(request).reads_metrics:
            raise HttpError(403, "this API key may not read metrics: it needs metrics: true", "no_metrics")

    async def health(request: Request) -> Response:
        """Shows that the process answers. Warnings are about engines whose canary has found wrong KV."""
        warnings = [f"{one.name}: {one.loading_off}" for one in service.engines.connections if one.loading_off]
        return JSONResponse({"status": "ok", "warnings": warnings} if warnings else {"status": "ok"})

    async def ready(request: Request) -> Response:
        """Whether all engines are connected and answer."""
        is_ready = service.is_ready and not service.is_draining
        document = {
            "status": _status(service),
            "models": {
                **{
                    model.name: {connection.name: _state(connection) for connection in model.connections}
                    for model in service.engines.models
                },
                **{
                    model.name: {engine.name: _state_of_vllm(engine) for engine in model.engines}
                    for model in service.vllm.models
                },
            },
        }
        if is_ready:
            return JSONResponse(document)
        return JSONResponse(document, 503, {"Retry-After": str(EngineAway.retry_after_s)})

    async def metrics(request: Request) -> Response:
        """The metrics of this process and of each engine, with the engine's name as a label."""
        check_reader(request)
        for engine in service.vllm.engines:
            service.metrics.engine_up.labels(engine=engine.name).set(engine.is_up)
        connections = service.engines.connections
        families = await asyncio.gather(*(connection.metrics() for connection in connections))
        found = [(connection.name, own) for connection, own in zip(connections, families, strict=True)]
        registry = CollectorRegistry()
        registry.register(_OfEngines(found))
        body = generate_latest(service.metrics.registry) + generate_latest(registry)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    async def metrics_of_vllm(request: Request) -> Response:
        """The metrics of an engine of vLLM, unchanged."""
        check_reader(request)
        name = request.path_params["engine"]
        engine = next((one for one in service.vllm.engines if one.name == name), None)
        if engine is None:
            raise HttpError(404, "no engine of vLLM has that name", "unknown_engine")
        try:
            status, body = await engine.get("/metrics", _METRICS_TIMEOUT_S, MAX_UPSTREAM_METRICS_BYTES)
        except (ExchangeError, TimeoutError) as error:
            raise EngineAway(f"the engine {engine.name} is starting, or does not answer") from error
        return Response(body, status, media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/metrics/{engine}", metrics_of_vllm),
    ]


def _status(service: Service) -> str:
    if service.is_draining:
        return "stopping"
    own, passed = service.engines.connections, service.vllm.engines
    if any(connection.is_hung for connection in own) or any(engine.is_hung for engine in passed):
        return "hung"
    if service.is_warming_up and service.engines.is_ready:
        return "warming"
    return "ready" if service.is_ready else "starting"


def _state(connection: EngineConnection) -> dict[str, object]:
    """`since` is when the engine became ready, in seconds of the epoch; `loading_off` is set if it loads nothing."""
    if connection.hello is None:
        return {"status": "starting"}
    state: dict[str, object] = {
        "status": "hung" if connection.is_hung else "ready",
        "since": connection.hello.started_at,
    }
    return {**state, "loading_off": connection.loading_off} if connection.loading_off else state


def _state_of_vllm(engine: VllmEngine) -> dict[str, object]:
    since = {} if engine.hello is None else {"since": engine.hello.since}
    return {"status": engine.status, **since}


class _OfEngines(Collector):
    def __init__(self, found: Iterable[tuple[str, list[MetricFamily]]]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for engine, families in self._found:
            for family in families:
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.kind))
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, "engine": engine}, sample.value)
        yield from merged.values()
