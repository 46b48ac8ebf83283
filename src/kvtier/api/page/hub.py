"""The page's event stream, computed once for all connected browsers. One event loop.

A reader that falls behind is dropped and may connect again. Without readers, nothing runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from kvtier.api.http_error import overloaded
from kvtier.api.limits import MAX_PAGE_EVENTS_UNREAD, MAX_PAGE_READERS, PAGE_TICK_S
from kvtier.api.page.board import Board

logger = logging.getLogger(__name__)

_RETRY = b"retry: 3000\n\n"


class _Reader:
    def __init__(self, is_allowed: Callable[[], bool]) -> None:
        self.is_allowed = is_allowed
        self.unread: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_PAGE_EVENTS_UNREAD)

    def send(self, data: bytes) -> bool:
        """False if the reader has fallen behind."""
        try:
            self.unread.put_nowait(data)
        except asyncio.QueueFull:
            return False
        return True

    def drop(self) -> None:
        """End the stream at once, and discard what is unread."""
        while not self.unread.empty():
            self.unread.get_nowait()
        self.unread.put_nowait(None)


class Hub:
    """Sends the state of `board` to all readers every `tick_s`. `rest` is called when the last reader has left."""

    def __init__(self, board: Board, rest: Callable[[], None], tick_s: float = PAGE_TICK_S) -> None:
        self._board = board
        self._rest = rest
        self._tick_s = tick_s
        self._readers: set[_Reader] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest = b""
        """The state at the last tick, for a reader that comes before the next one."""
        self._is_closed = False

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    async def events(self, is_allowed: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Events until the reader leaves, falls behind or loses its permission, or the server stops.

        The first chunk is empty, once the reader is registered. Raises `HttpError` if there are too many readers.
        """
        if len(self._readers) >= MAX_PAGE_READERS or self._is_closed:
            raise overloaded("too many pages are open: close some")
        reader = _Reader(is_allowed)
        self._readers.add(reader)
        if self._newest:
            reader.send(self._newest)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="kvtier-page")
        try:
            yield b""
            yield _RETRY
            while (data := await reader.unread.get()) is not None:
                yield data
        finally:
            self._readers.discard(reader)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for reader in self._readers:
            reader.drop()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        last = 0
        try:
            while self._readers:
                try:
                    events, last = await self._board.events(last)
                    self._newest = events[0]
                    self._send(b"".join(events))
                except Exception as error:  # a bug of ours: the next tick may succeed
                    logger.warning("the page could not be updated: %s", str(error))
                await asyncio.sleep(self._tick_s)
        finally:
            self._task = None
            self._newest = b""
            self._rest()

    def _send(self, data: bytes) -> None:
        for reader in list(self._readers):
            if not reader.is_allowed() or not reader.send(data):
                self._readers.discard(reader)
                reader.drop()
