"""One request to a server on a Unix socket, and its answer while it arrives. One event loop.

Each connection serves one request: closing it tells the server that the answer is no longer wanted. An answer is read
as fast as the caller takes it, with a small read-ahead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import httptools

from kvtier.api.limits import MAX_HEADERS, MAX_UNSENT_BYTES, MAX_UPSTREAM_HEAD_BYTES

Headers = Sequence[tuple[bytes, bytes]]

_CONNECT_S = 10.0
_FIRST_FINAL_STATUS = 200


class ExchangeError(Exception):
    """No complete answer: no listener, a broken connection, or bytes that are not HTTP.

    `was_sent` says whether the server may have seen the request.
    """

    def __init__(self, sentence: str, *, was_sent: bool) -> None:
        super().__init__(sentence)
        self.was_sent = was_sent


class Exchange:
    """Made by `send`. `status` and `headers` are valid after `head`; header names are in lower case."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._protocol = _Protocol(self)

    @classmethod
    async def send(
        cls, socket_path: str, method: str, target: str, headers: Headers, body: Sequence[bytes] = ()
    ) -> Exchange:
        """Connect and send a request. Raises `ExchangeError`; then, and if cancelled, no connection stays open."""
        exchange = cls()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                await loop.create_unix_connection(lambda: exchange._protocol, socket_path)
        except (OSError, TimeoutError) as error:
            raise ExchangeError(f"cannot connect: {error}", was_sent=False) from error
        try:
            await exchange._protocol.write(_head(method, target, headers, body), *body)
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def head(self) -> None:
        """Wait for the head of the answer. Raises `ExchangeError`."""
        await self._protocol.wait_for_head()

    async def read(self) -> bytes:
        """The next bytes of the body, at least one; empty at its end. Raises `ExchangeError` if the body is cut off."""
        return await self._protocol.read()

    def cut_off(self, sentence: str) -> None:
        """Close the connection: reads beyond what has arrived raise `ExchangeError`."""
        self._protocol.fail(sentence)

    def close(self) -> None:
        self._protocol.abort()


def _head(method: str, target: str, headers: Headers, body: Sequence[bytes]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1".encode("ascii"), b"host: localhost", b"connection: close"]
    lines += [name + b": " + value for name, value in headers]
    if body or method not in ("GET", "HEAD"):
        lines.append(b"content-length: " + str(sum(map(len, body))).encode())
    return b"\r\n".join([*lines, b"", b""])


class _Protocol(asyncio.Protocol):
    """The connection, and the parser's callbacks (`on_...`)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._arrived = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._num_unread = 0
        self._head_bytes = 0
        self._has_head = False
        self._is_complete = False
        self._is_paused = False
        self._error: ExchangeError | None = None

    # --- for the exchange ---------------------------------------------------------------------------------------------

    async def write(self, *pieces: bytes) -> None:
        """Write pieces as fast as the server takes them. If it has already answered, the rest is not sent."""
        for piece in pieces:
            await self._may_write.wait()
            if self._has_head or self._error is not None or self._transport is None:
                return
            self._transport.write(piece)

    async def wait_for_head(self) -> None:
        while not self._has_head:
            await self._wait()

    async def read(self) -> bytes:
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._wait()
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._num_unread = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._arrived.clear()
        await self._arrived.wait()

    def fail(self, sentence: str) -> None:
        if self._error is None and not self._is_complete:
            self._error = ExchangeError(sentence, was_sent=True)
        self._may_write.set()
        self._arrived.set()
        self.abort()

    # --- for the transport --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._is_complete or self._error is not None:
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(f"the answer is not HTTP: {error}")
            return
        if not self._has_head and self._head_bytes > MAX_UPSTREAM_HEAD_BYTES:
            self.fail("the head of the answer is too long")
        elif self._num_unread > MAX_UNSENT_BYTES and not self._is_paused and not self._is_complete:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.fail("the connection was cut off")

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # --- for the parser -----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._exchange.headers) >= MAX_HEADERS:
            raise ValueError("the head of the answer has too many headers")
        self._exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:  # an informational response: the answer follows
            self._exchange.headers.clear()
            return
        self._exchange.status = status
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_unread += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            self._arrived.set()
