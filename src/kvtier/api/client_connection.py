"""One client's connection, with limits that uvicorn's own parser lacks: how long a request's head may be and may take.

Between requests uvicorn's keep-alive timer holds, and bodies are limited by who reads them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvtier.api.streaming import ABORT

MAX_HEAD_BYTES = 64 << 10
_HEADER_EXTRA_BYTES = len(": \r\n")


class ClientConnection(HttpToolsProtocol):
    """Answers a head of more than `MAX_HEAD_BYTES` with 431, and closes what sends no whole head in its time."""

    head_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # of the head that is coming, or of trailers: whatever is not a body
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()

    def on_headers_complete(self) -> None:
        extra_bytes = _HEADER_EXTRA_BYTES * len(self.headers)
        self._head_bytes = len(self.url) + extra_bytes + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")  # ends the parsing, which calls `send_400_response`
        self._head_bytes = 0
        self._stop_timer()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Also of one who has not read its last answer: closing would wait for that."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        self.transport.write(STATUS_LINE[431] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
