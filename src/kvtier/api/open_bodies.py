"""Limits arriving bodies: their number, their total size, and their time. One event loop.

If there is no room, the slowest body is ended: a client that sends single bytes slowly cannot keep others out, and no
upload at full speed is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from kvtier.api.http_error import HttpError, overloaded
from kvtier.api.limits import (
    BODY_TIMEOUT_S,
    MAX_OPEN_BODIES,
    MAX_SLOW_BODIES,
    OPEN_BODIES_OVER_LARGEST,
    SLOW_BODY_S,
)
from kvtier.sizes import format_size


class _Arrival:
    def __init__(self, began_at: float, deadline: asyncio.Timeout) -> None:
        self.began_at = began_at
        self.deadline = deadline
        self.num_bytes = 0

    def speed(self, now: float) -> float:
        """Bytes per second."""
        return self.num_bytes / max(1e-3, now - self.began_at)


class OpenBodies:
    """`max_bytes` is the size of the largest body."""

    timeout_s = BODY_TIMEOUT_S
    slow_s = SLOW_BODY_S
    max_slow = MAX_SLOW_BODIES
    max_open = MAX_OPEN_BODIES

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arrivals: set[_Arrival] = set()
        self._num_bytes = 0

    @property
    def num_open(self) -> int:
        return len(self._arrivals)

    async def receive(self, request: Request) -> list[bytes]:
        """The body of `request`, in pieces, since joining a large one takes long.

        Raises `HttpError` if it is too large or too slow, or if there is no room for it.
        """
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        pieces = []
        async with self._arriving() as arrival:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece = message.get("body", b"")
                self._take(arrival, len(piece))
                pieces.append(piece)
                if not message.get("more_body", False):
                    break
        return pieces

    @asynccontextmanager
    async def _arriving(self) -> AsyncIterator[_Arrival]:
        now = asyncio.get_running_loop().time()
        if len(self._arrivals) >= self.max_slow and not self._end_slowest(now) and len(self._arrivals) >= self.max_open:
            raise overloaded(f"{len(self._arrivals)} bodies are arriving, which is the limit")
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                arrival = _Arrival(now, deadline)
                self._arrivals.add(arrival)
                try:
                    yield arrival
                finally:
                    self._forget(arrival)
        except TimeoutError as error:
            sentence = f"the body did not arrive within {self.timeout_s:g} s, or was ended earlier since others wait"
            raise HttpError(408, sentence, "timeout", headers={"Connection": "close"}) from error

    def _take(self, arrival: _Arrival, num_bytes: int) -> None:
        arrival.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if arrival.num_bytes > self._max_bytes:
            raise self._too_large()
        while self._num_bytes > OPEN_BODIES_OVER_LARGEST * self._max_bytes:
            if not self._end_slowest(asyncio.get_running_loop().time()):
                raise overloaded("too many large bodies are arriving")

    def _end_slowest(self, now: float) -> bool:
        """End the slowest body to make room. False if no body is slow."""
        slow = [arrival for arrival in self._arrivals if now - arrival.began_at >= self.slow_s]
        if not slow:
            return False
        slowest = min(slow, key=lambda arrival: arrival.speed(now))
        self._forget(slowest)
        slowest.deadline.reschedule(now)
        return True

    def _forget(self, arrival: _Arrival) -> None:
        if arrival in self._arrivals:
            self._arrivals.remove(arrival)
            self._num_bytes -= arrival.num_bytes

    def _too_large(self) -> HttpError:
        sentence = f"the body is larger than {format_size(self._max_bytes)}"
        return HttpError(413, sentence, "body_too_large", headers={"Connection": "close"})
