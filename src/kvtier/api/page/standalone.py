"""A cache server's own page, on its own port: an event loop in one thread of the server's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.api.access import Access
from kvtier.api.client_connection import check_certificate, uvicorn_config
from kvtier.api.config import ApiKey, PageConfig
from kvtier.api.http_error import HttpError, WrongKey
from kvtier.api.page.cache_server_view import CacheServerView, ObservedServer
from kvtier.api.page.page import Page
from kvtier.api.streaming import ClientLeft
from kvtier.api.web_guard import WebGuard, WebRules
from kvtier.api.wrong_keys import WrongKeys
from kvtier.errors import ConfigError
from kvtier.transport.address import TcpAddress
from kvtier.transport.listening import listen_tcp

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TOKEN_NAME = "token"
_BACKLOG = 128
_STOP_S = 2


class PageServer:
    """Serves from construction until `close`.

    With a `token`, readers must log in with it. Without one the address must be on this host's loopback: then every
    user of this host can read the page, as with the metrics. On other addresses the page speaks TLS if there is a
    `certificate` with its key. The page cannot change anything. Raises `ConfigError`.
    """

    def __init__(
        self,
        address: TcpAddress,
        server: ObservedServer,
        shown_address: str,
        token: bytes | None = None,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        is_local = address.host in _LOOPBACK
        if token is None and not is_local:
            raise ConfigError(f"a page on {address.host} needs --token-file; only a page on 127.0.0.1 does not")
        tls = {}
        if certificate is not None and not is_local:
            check_certificate(*certificate)
            tls = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
        self._access = Access(_keys(token))
        self._wrong_keys = WrongKeys()
        try:
            self._listener = listen_tcp(address)
        except ConfigError as error:
            reason = str(error).rpartition(": ")[2]
            raise ConfigError(f"cannot show a page on {address.host}:{address.port}: {reason}") from error
        self._page = Page(CacheServerView(server, shown_address), self._access, PageConfig(), may_change=False)
        self._server = _Server(uvicorn_config(self._app(address.host), stop_s=_STOP_S, backlog=_BACKLOG, **tls))
        self.url = f"{'https' if tls else 'http'}://{address.host}:{self.port}/"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-page", daemon=True)
        self._thread.start()
        self._is_up.wait()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._is_up.set()
            runner.run(self._server.serve([self._listener]))

    def _stop(self) -> None:
        self._page.close()
        self._server.should_exit = True

    def _app(self, host: str) -> ASGIApp:
        app = Starlette(
            routes=self._page.routes(),
            exception_handlers={
                HttpError: self._on_http_error,
                HTTPException: self._on_starlette_error,
                ClientLeft: _on_client_left,
            },
        )
        app.router.redirect_slashes = False
        rules = WebRules.make(listens_on=[host], allow_hosts=[], allow_origins=[], has_keys=self._access.has_keys)
        return WebGuard(self._page.guarded(app, self._refuse), rules, self._refuse)

    async def _refuse(self, error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._on_http_error(Request(scope), error)
        await response(scope, receive, send)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        if isinstance(error, WrongKey):
            host = "" if request.client is None else request.client.host
            error = await self._wrong_keys.slow_down(host, error)
        fields = {"message": error.sentence, "type": "error", "param": error.parameter, "code": error.code}
        return Response(msgspec.json.encode({"error": fields}), error.status, error.headers, "application/json")

    async def _on_starlette_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await self._on_http_error(request, HttpError(error.status_code, error.detail, "unknown_url"))


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


def _keys(token: bytes | None) -> list[ApiKey]:
    if token is None:
        return []
    try:
        return [ApiKey(name=_TOKEN_NAME, key=token.decode("ascii"), metrics=True)]
    except UnicodeDecodeError as error:
        raise ConfigError("a page needs a token of printable ASCII to log in with") from error


class _Server(uvicorn.Server):
    """A server that leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
