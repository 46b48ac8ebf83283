"""Answers that are ended when their client leaves or stops reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvtier.api.limits import STREAM_STALL_S

_Result = TypeVar("_Result")

ABORT = "kvtier.abort"
"""In a request's scope: a function that aborts its connection."""


class ClientLeft(Exception):
    """The client has closed its connection."""


async def while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. If the client closes the connection, `work` is cancelled and `ClientLeft` raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        await _end(working, leaving)


class StreamedAnswer(Response):
    """Sends `chunks` as they are made. If the client leaves, the generator is closed.

    The generator is also closed if the client reads nothing for `stall_s`; then the connection is aborted, and what the
    client has not read is lost.
    """

    stall_s = STREAM_STALL_S

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], *, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._chunks = chunks
        self._blocked_since: float | None = None
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        is_stalled = False
        try:
            done: set[asyncio.Future[None]] = set()
            while not done and not is_stalled:
                done, _ = await asyncio.wait(
                    {sending, leaving}, timeout=self.stall_s / 4, return_when=asyncio.FIRST_COMPLETED
                )
                is_stalled = self._is_stalled()
            if sending.done():
                sending.result()
        finally:
            await _end(sending, leaving)
            await self._chunks.aclose()
            if is_stalled and ABORT in scope:
                scope[ABORT]()
                await asyncio.sleep(0)  # lets the server notice that the connection is gone

    def _is_stalled(self) -> bool:
        since = self._blocked_since
        return since is not None and asyncio.get_running_loop().time() - since >= self.stall_s

    async def _send(self, send: Send) -> None:
        time = asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            self._blocked_since = time()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._blocked_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
