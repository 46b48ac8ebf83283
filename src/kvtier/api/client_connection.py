"""A client's connection, with limits that uvicorn's own parser lacks: on the size and duration of a request's head, on
the chunks of a body, and on the requests that wait for an answer.

The parser calls back for each header, chunk and request in the data that was read, and blocks the event loop
meanwhile: the limits bound the number of these calls. Between requests, uvicorn's keep-alive timer applies; the
application that reads a body limits its size.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvtier.api.http_error import REFUSAL, HttpError, overloaded
from kvtier.api.limits import CHUNK_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, NUM_FREE_CHUNKS
from kvtier.api.streaming import ABORT
from kvtier.errors import ConfigError
from kvtier.sizes import format_size

_KEEP_ALIVE_S = 75
_HEADER_EXTRA_BYTES = len(": \r\n")
_PARSED_AT_ONCE_BYTES = 32 << 10
"""Bytes read between two checks of the limits."""

_TOO_MANY_CHUNKS = f"the body has too many small chunks: send chunks of at least {CHUNK_BYTES} bytes"
_TOO_MANY_REQUESTS = f"more than {MAX_PIPELINED} requests wait on this connection: wait for their answers"

_HEAD_TOO_LONG = f"the head is longer than {format_size(MAX_HEAD_BYTES)}, or has more than {MAX_HEADERS} headers"
_NOT_HTTP = "this is not a request of HTTP"
_MAX_PATH_BYTES = 256
_CLOSE = {"connection": "close"}


async def _receive_nothing() -> Message:
    return {"type": "http.disconnect"}


def uvicorn_config(app: ASGIApp, *, stop_s: int, backlog: int, **tls: Any) -> uvicorn.Config:
    """The settings of all HTTP servers here: limited client connections, and no header about the server's software."""
    return uvicorn.Config(
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
        timeout_graceful_shutdown=stop_s,
        backlog=backlog,
        **tls,
    )


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises `ConfigError` for a certificate that cannot be used."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the TLS certificate {certificate}: {error}") from error


class ClientConnection(HttpToolsProtocol):
    """Answers an oversized head with 431, a body with too many chunks with 400, and a request over the limit with 429.

    The application writes these answers, in its API's form: the error is in the `scope` under `REFUSAL`. The connection
    is then closed, as is one that does not complete a head in time. Requests before the one over the
    limit are answered first.
    """

    head_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of the head that is arriving, or of trailers: everything but bodies
        self._head_timer: asyncio.TimerHandle | None = None
        self._pieces: list[bytes] = []  # of the body, one per callback; the application gets them joined
        self._spare_chunks = 0  # further chunks that the body may have
        self._takes_no_more = False  # a request over the limit has arrived: nothing after it is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) <= _PARSED_AT_ONCE_BYTES:
            self._parse(data)
            return
        whole = memoryview(data)
        for start in range(0, len(data), _PARSED_AT_ONCE_BYTES):
            if self.transport.is_closing():
                return
            self._parse(whole[start : start + _PARSED_AT_ONCE_BYTES])

    def _parse(self, data: bytes | memoryview) -> None:
        if self._takes_no_more:
            self.flow.pause_reading()
            return
        self._head_bytes += len(data)
        super().data_received(data)  # type: ignore[arg-type]  # the parser takes any buffer
        self._pass_body_on()
        if self.transport.is_closing() or self._takes_no_more:
            return
        if self._spare_chunks < 0:
            self._refuse_chunks()
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._head_bytes = MAX_HEAD_BYTES + 1
            raise ValueError("the head has too many headers")  # ends the parsing, which calls `send_400_response`
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        extra_bytes = _HEADER_EXTRA_BYTES * len(self.headers)
        self._head_bytes = len(self.url) + extra_bytes + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
        self._head_bytes = 0
        self._spare_chunks = NUM_FREE_CHUNKS
        self._stop_timer()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        if len(self.pipeline) < MAX_PIPELINED:
            super().on_headers_complete()
            return
        error = overloaded(_TOO_MANY_REQUESTS)
        error.headers |= _CLOSE
        self.scope[REFUSAL] = error  # type: ignore[literal-required]  # this request is answered in its turn
        super().on_headers_complete()
        self._takes_no_more = True
        raise ValueError("too many requests wait")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._pass_body_on()
        self._head_bytes = 0
        super().on_message_complete()

    def _pass_body_on(self) -> None:
        """Pass the body read so far on. The first chunk of each read is free: it costs no more than the read itself."""
        if not self._pieces:
            return
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._spare_chunks += len(body) // CHUNK_BYTES - len(self._pieces) + 1
        self._pieces.clear()
        self._head_bytes = 0
        super().on_body(body)

    def timeout_keep_alive_handler(self) -> None:
        """Close even if the client has not read its last answer: a plain close would wait for that."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if self._takes_no_more:
            return  # it is answered after the requests before it, or with another error
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(HttpError(400, _NOT_HTTP, "invalid_http"))

    def _refuse_chunks(self) -> None:
        self._refuse(HttpError(400, _TOO_MANY_CHUNKS, "too_many_chunks"))

    def _refuse_head(self) -> None:
        self._refuse(HttpError(431, _HEAD_TOO_LONG, "head_too_large"))

    def _refuse(self, error: HttpError) -> None:
        """Answer with the error, and close. If an answer to this request or an earlier one has begun, it is cut off: an
        error could not follow it.
        """
        cycle = self.cycle
        self._takes_no_more = True
        self._stop_timer()
        is_answered = cycle is not None and cycle.response_started and (cycle.more_body or not cycle.response_complete)
        if self.pipeline or is_answered:
            self.transport.close()
            return
        self.flow.pause_reading()
        task = self.loop.create_task(self._answer(error))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, error: HttpError) -> None:
        head, body = STATUS_LINE[error.status], b""

        async def send(message: Message) -> None:
            nonlocal head, body
            head += b"".join(b"%s: %s\r\n" % pair for pair in message.get("headers", ()))
            body += message.get("body", b"")

        try:
            await self.app(self._scope_of(error), _receive_nothing, send)
        finally:
            if not self.transport.is_closing():
                self.transport.write(head + b"connection: close\r\n\r\n" + body)
                self.transport.close()

    def _scope_of(self, error: HttpError) -> dict[str, Any]:
        """A scope with as much of the request's path as has arrived: some paths have errors of another form."""
        path = getattr(self, "url", b"") or b""
        path = path.partition(b"?")[0][:_MAX_PATH_BYTES]
        path = path if path.startswith(b"/") and path.isascii() else b"/"
        return {
            "type": "http",
            "asgi": {"version": self.config.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": self.scheme,
            "method": "GET",
            "path": path.decode("ascii"),
            "raw_path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "client": self.client,
            "server": self.server,
            "state": {},
            REFUSAL: error,
        }

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
