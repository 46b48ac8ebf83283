"""The HTTP server's process: both APIs in one event loop, on sockets that were bound before, until it is told to stop.

A stop drains: nothing new is taken, what is under way has `drain_s` to end, then it is broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.api.application import Application
from kvtier.api.client_connection import ClientConnection
from kvtier.api.config import ApiConfig, ServedModelConfig
from kvtier.api.engine_connection import DEFAULT_PATIENCE, EngineConnection, Patience
from kvtier.api.engines import Engines, ServedModel
from kvtier.api.ollama.routes import OllamaApplication
from kvtier.api.openai.routes import OpenAiApplication
from kvtier.api.service import Service
from kvtier.api.vllm.engine import VllmEngine
from kvtier.api.vllm.model import VllmModel, VllmModels
from kvtier.api.web_guard import OLLAMA_ORIGINS, WebRules
from kvtier.errors import ConfigError
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import ApiMetrics

logger = logging.getLogger(__name__)
_uvicorn_logger = logging.getLogger("uvicorn.error")

_APPLICATIONS: Mapping[str, type[Application]] = {"openai": OpenAiApplication, "ollama": OllamaApplication}
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_FEW_FILES = 4096


def serve_http(
    config: ApiConfig, listeners: Sequence[tuple[str, socket.socket]], is_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve the API of each listener ("openai" or "ollama") on its socket. Returns after SIGTERM or SIGINT."""
    raise_file_limit()
    _uvicorn_logger.addFilter(LogLimit(_uvicorn_logger).filter)  # a line for each broken request is a flood
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, listeners, is_ready))


async def _serve(
    config: ApiConfig, listeners: Sequence[tuple[str, socket.socket]], is_ready: Callable[[], None]
) -> None:
    service = make_service(config)
    servers = [http_server(api, service) for api, _ in listeners]
    _check_tls(config)

    def stop() -> None:
        if service.is_draining:  # asked twice: what is under way need not end
            for server in servers:
                server.force_exit = True
        service.is_draining = True
        for server in servers:
            server.should_exit = True
        logger.info("stopping; %d requests are under way", service.num_requests)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    service.start()
    try:
        serving = [
            asyncio.create_task(server.serve([sock])) for server, (_, sock) in zip(servers, listeners, strict=True)
        ]
        while not all(server.started for server in servers) and not any(task.done() for task in serving):
            await asyncio.sleep(0.01)
        is_ready()
        await asyncio.gather(*serving)
    finally:
        await service.close()


def http_server(api: str, service: Service) -> uvicorn.Server:
    """One API ("openai" or "ollama") over `service`, not yet serving. It leaves signals to whoever runs it."""
    rules = _web_rules(api, service.config)
    app = _counted(api, service, rules)
    if api != "openai":
        app = _WithOpenAi(app, _counted("openai", service, rules))
    config = service.config
    return _Server(
        uvicorn.Config(
            app,
            http=ClientConnection,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(service.config.drain_s)),
            backlog=_BACKLOG,
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        )
    )


def _check_tls(config: ApiConfig) -> None:
    """Raises `ConfigError` for a certificate that cannot be used."""
    if config.tls_certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the TLS certificate {config.tls_certificate}: {error}") from error


def make_service(config: ApiConfig, patience: Patience = DEFAULT_PATIENCE) -> Service:
    """With connections to the engines that are not started yet."""
    metrics = ApiMetrics()
    models = [
        ServedModel(
            names=model.names,
            connections=[EngineConnection(engine.name, engine.socket, patience) for engine in model.engines],
            default_options=model.default_options,
            listed=model.listed,
        )
        for model in config.models
        if not model.is_vllm
    ]
    passed = [_vllm_model(model, patience, metrics) for model in config.models if model.is_vllm]
    others = [model.name for model in passed]
    return Service(config, Engines(models, others), metrics=metrics, vllm=VllmModels(passed))


def _vllm_model(config: ServedModelConfig, patience: Patience, metrics: ApiMetrics) -> VllmModel:
    engines = [VllmEngine(engine.name, engine.socket, patience) for engine in config.engines]
    model = VllmModel(config.names, engines, metrics, config.listed)
    for engine in engines:
        engine.note_there = model.note_there
    return model


def raise_file_limit() -> None:
    """Every connection is an open file: as many as the process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        logger.warning("only %d files may be open, connections among them: raise the limit (ulimit -Hn)", hard)


class _Server(uvicorn.Server):
    """Signals are ours: two servers share a loop."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():  # what it accepts inherits this, which asyncio does not set for every socket
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _WithOpenAi:
    """Another API, and OpenAI's under `/v1`, where Ollama serves it too."""

    def __init__(self, app: ASGIApp, openai: ASGIApp) -> None:
        self._app = app
        self._openai = openai

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_openai = f"{scope.get('path', '')}/".startswith("/v1/")
        await (self._openai if is_openai else self._app)(scope, receive, send)


def _web_rules(api: str, config: ApiConfig) -> WebRules:
    """On Ollama's port pages of this machine may ask, as they may ask Ollama."""
    return WebRules.make(
        listens_on=config.hosts,
        allow_hosts=config.allow_hosts,
        allow_origins=[*config.allow_origins, *(OLLAMA_ORIGINS if api == "ollama" else ())],
        has_keys=bool(config.keys),
    )


def _counted(api: str, service: Service, rules: WebRules) -> ASGIApp:
    application = _APPLICATIONS[api](service)
    app = application.starlette()
    return _Counted(application.guarded(app, rules), app.routes, api, service)


class _Counted:
    """Counts every request by its route and status; unknown paths together, so that nobody can make up series."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], api: str, service: Service) -> None:
        self._app = app
        self._api = api
        self._paths = {getattr(route, "path", "") for route in routes}
        self._requests = service.metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # the client left before it was answered

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
        import uvloop  # noqa: PLC0415 - faster where it is installed
    except ImportError:
        return None
    return uvloop.new_event_loop
