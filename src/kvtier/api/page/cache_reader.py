"""Reads the stats of a cache server of the deployment over its Unix socket. Blocks; used by one thread at a time."""

from __future__ import annotations

import json
import os
import secrets
import time

from kvtier.api.page.curve_cache import CurveCache
from kvtier.client.server_connection import ServerConnection
from kvtier.errors import KvtierError
from kvtier.transport.address import UnixAddress, parse_address
from kvtier.wire import messages as wire

_TIMEOUT_S = 1.0


class CacheReader:
    """Connects with the first request and stays connected until `close`, after which it may connect again."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._connection: ServerConnection | None = None
        self._curve = CurveCache(lambda: self._document(wire.MissCurveRequest(0)))

    def stats(self) -> dict[str, object] | None:
        """The server's stats with its `hit_curve`; None while the server does not answer."""
        document = self._document(wire.StatsRequest())
        return None if document is None else {**document, "hit_curve": self._curve.points()}

    def noted(self, request_id: str) -> str:
        """An engine's note on a request; empty if there is none."""
        try:
            question = wire.NotedRequest(request_id)
        except ValueError:
            return ""
        return self._text(question) or ""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _document(self, question: wire.StatsRequest | wire.MissCurveRequest) -> dict[str, object] | None:
        text = self._text(question)
        if text is None:
            return None
        try:
            document = json.loads(text)
        except ValueError:
            return None
        return document if isinstance(document, dict) else None

    def _text(self, question: wire.StatsRequest | wire.NotedRequest | wire.MissCurveRequest) -> str | None:
        deadline = time.monotonic() + _TIMEOUT_S
        is_new = self._connection is None
        text = self._answer(question, deadline)
        if text is None and not is_new:  # the server may have been started again since the last request
            text = self._answer(question, deadline)
        return text

    def _answer(
        self, question: wire.StatsRequest | wire.NotedRequest | wire.MissCurveRequest, deadline: float
    ) -> str | None:
        """None if the server does not answer; the connection is then closed."""
        try:
            if self._connection is None:
                self._connection = self._connect(deadline)
            return self._connection.call(question, wire.Document, deadline).text
        except (KvtierError, OSError):
            self.close()
            return None

    def _connect(self, deadline: float) -> ServerConnection:
        address = parse_address(self.address)
        connection = ServerConnection(address, secrets.token_bytes(wire.HOLDER_BYTES), deadline)
        if isinstance(address, UnixAddress):
            os.close(connection.take_arena_fd())
        return connection
