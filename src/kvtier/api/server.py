"""The HTTP server's process: serves both APIs in one event loop, on sockets bound by its caller, until it is stopped.

A stop drains: no new requests are accepted, and those in flight may take `drain_s`; then they are cut off, and streams
end with an error event. A second stop signal cuts them off at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.api.application import Application
from kvtier.api.client_connection import check_certificate, uvicorn_config
from kvtier.api.config import ApiConfig, ServedModelConfig
from kvtier.api.engine_connection import DEFAULT_PATIENCE, EngineConnection, ProbeTimes
from kvtier.api.engines import Engines, ServedModel
from kvtier.api.http_error import unavailable
from kvtier.api.ollama.routes import OllamaApplication
from kvtier.api.openai.routes import OpenAiApplication
from kvtier.api.service import CUT_OFF, Service
from kvtier.api.tracing import NoTracing, Tracing, make_tracing
from kvtier.api.vllm.engine import VllmEngine
from kvtier.api.vllm.model import VllmModel, VllmModels
from kvtier.api.warm_up import warm_at_start
from kvtier.api.web_guard import OLLAMA_ORIGINS, WebRules
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import ApiMetrics
from kvtier.observe.printable import printable
from kvtier.observe.recent_warnings import RecentWarnings

logger = logging.getLogger(__name__)
_uvicorn_logger = logging.getLogger("uvicorn.error")

_APPLICATIONS: Mapping[str, type[Application]] = {"openai": OpenAiApplication, "ollama": OllamaApplication}
_BACKLOG = 2048
_FEW_FILES = 4096
_CUT_S = 3
"""Time for requests that were cut off to send their errors."""


def serve_http(
    config: ApiConfig,
    listeners: Sequence[tuple[str, socket.socket]],
    is_ready: Callable[[], None] = lambda: None,
    warnings: RecentWarnings | None = None,
) -> None:
    """Serve the API of each listener ("openai" or "ollama") on its socket. Returns after SIGTERM or SIGINT."""
    raise_file_limit()
    _uvicorn_logger.addFilter(LogLimit(_uvicorn_logger).filter)  # one line per broken request would flood the log
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, listeners, is_ready, warnings or RecentWarnings()))


async def _serve(
    config: ApiConfig,
    listeners: Sequence[tuple[str, socket.socket]],
    is_ready: Callable[[], None],
    warnings: RecentWarnings,
) -> None:
    service = make_service(config)
    service.warnings = warnings
    servers = [http_server(api, service) for api, _ in listeners]
    if config.tls_certificate is not None and config.tls_key is not None:
        check_certificate(config.tls_certificate, config.tls_key)

    loop = asyncio.get_running_loop()

    def leave() -> None:
        for server in servers:
            server.force_exit = True

    def stop() -> None:
        if service.is_draining:  # the second signal: do not wait for requests in flight
            service.cut_off()
            loop.call_later(_CUT_S, leave)
            return
        service.begin_to_drain()
        for server in servers:
            server.should_exit = True
        logger.info("stopping; %d requests are in flight", service.num_requests)
        loop.call_later(config.drain_s, service.cut_off)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    service.start()
    service.is_warming_up = bool(config.warm)
    warming = asyncio.create_task(warm_at_start(service), name="kvtier-warm-up")
    try:
        serving = [
            asyncio.create_task(server.serve([sock])) for server, (_, sock) in zip(servers, listeners, strict=True)
        ]
        while not all(server.started for server in servers) and not any(task.done() for task in serving):
            await asyncio.sleep(0.01)
        is_ready()
        await asyncio.gather(*serving)
    finally:
        warming.cancel()
        await asyncio.wait({warming})
        await service.close()


def http_server(api: str, service: Service) -> uvicorn.Server:
    """A server for one API ("openai" or "ollama") over `service`, not yet serving. The caller handles signals."""
    rules = _web_rules(api, service.config)
    app = _counted(api, service, rules)
    if api != "openai":
        app = _WithOpenAi(app, _counted("openai", service, rules))
    config = service.config
    return _Server(
        uvicorn_config(
            app,
            stop_s=math.ceil(config.drain_s) + _CUT_S,
            backlog=_BACKLOG,
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        )
    )


def make_service(
    config: ApiConfig, patience: ProbeTimes = DEFAULT_PATIENCE, tracing: Tracing | NoTracing | None = None
) -> Service:
    """The service, with connections that are not yet started; by default `tracing` uses OpenTelemetry's provider."""
    metrics = ApiMetrics()
    models = [
        ServedModel(
            names=model.names,
            connections=[EngineConnection(engine.name, engine.socket, patience) for engine in model.engines],
            default_options=model.default_options,
            listed=model.listed,
            tool_format=model.tool_format,
            reasoning_format=model.reasoning_format,
        )
        for model in config.models
        if not model.is_vllm
    ]
    passed = [_vllm_model(model, patience, metrics) for model in config.models if model.is_vllm]
    others = [model.name for model in passed]
    tracing = make_tracing() if tracing is None else tracing
    return Service(config, Engines(models, others), metrics=metrics, vllm=VllmModels(passed), tracing=tracing)


def _vllm_model(config: ServedModelConfig, patience: ProbeTimes, metrics: ApiMetrics) -> VllmModel:
    engines = [VllmEngine(engine.name, engine.socket, patience, engine.prompts) for engine in config.engines]
    model = VllmModel(config.names, engines, metrics, config.listed)
    for engine in engines:
        engine.note_up = model.note_up
    return model


def raise_file_limit() -> None:
    """Raise the limit of open files to the maximum: every connection is an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        logger.warning("at most %d files, connections included, can be open: raise the limit (ulimit -Hn)", hard)


class _Server(uvicorn.Server):
    """A server that leaves signals to `_serve`, since two servers share the loop."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():  # accepted connections inherit this; asyncio does not set it for all of them
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _WithOpenAi:
    """Serves OpenAI's API under `/v1`, as Ollama does, and another API on all other paths."""

    def __init__(self, app: ASGIApp, openai: ASGIApp) -> None:
        self._app = app
        self._openai = openai

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_openai = f"{scope.get('path', '')}/".startswith("/v1/")
        await (self._openai if is_openai else self._app)(scope, receive, send)


def _web_rules(api: str, config: ApiConfig) -> WebRules:
    """On Ollama's port, pages of this machine are allowed, as in Ollama."""
    return WebRules.make(
        listens_on=config.hosts,
        allow_hosts=config.allow_hosts,
        allow_origins=[*config.allow_origins, *(OLLAMA_ORIGINS if api == "ollama" else ())],
        has_keys=bool(config.keys),
    )


def _counted(api: str, service: Service, rules: WebRules) -> ASGIApp:
    application = _APPLICATIONS[api](service)
    app = application.starlette()
    paths = {getattr(route, "path", "") for route in app.routes}
    counted = _Counted(_Ended(application.guarded(app, rules), application), paths, api, service)
    return service.tracing.traced(counted, api, paths)


class _Ended:
    """Wraps `app` for the end of a drain, when requests are cancelled: those without a response yet get an error."""

    def __init__(self, app: ASGIApp, application: Application) -> None:
        self._app = app
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not self._application.service.is_draining:
                raise
            logger.warning("a request for %s was cut off", printable(scope.get("path", "")))
            if not has_begun:
                await self._application.refuse(unavailable(CUT_OFF), scope, receive, send)


class _Counted:
    """Counts requests by route and status. Unknown paths share a label, so clients cannot create time series."""

    def __init__(self, app: ASGIApp, paths: Set[str], api: str, service: Service) -> None:
        self._app = app
        self._api = api
        self._paths = paths
        self._requests = service.metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # used if the client leaves before there is a response

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope.get("path", "")
            known = path if path in self._paths else "other"
            self._requests.labels(api=self._api, path=known, status=str(status)).inc()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - optional; faster than asyncio's own loop
    except ImportError:
        return None
    return uvloop.new_event_loop
