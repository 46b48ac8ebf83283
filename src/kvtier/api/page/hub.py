"""The stream of what changes, for any number of browsers: computed once for all of them. One event loop.

A reader that does not read is dropped; it may ask again. While there is no reader, nothing runs.
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

    def tell(self, data: bytes) -> bool:
        """False if it has too much to read."""
        try:
            self.unread.put_nowait(data)
        except asyncio.QueueFull:
            return False
        return True

    def drop(self) -> None:
        """Nothing more comes, not even what is unread."""
        while not self.unread.empty():
            self.unread.get_nowait()
        self.unread.put_nowait(None)


class Hub:
    """Tells readers what `board` has, every `tick_s`. `rest` is called when the last of them has gone."""

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
        """Until the reader leaves or falls behind, may not read any more, or the server stops.

        First nothing, once the reader has its place; where there are too many of them, a `HttpError`.
        """
        if len(self._readers) >= MAX_PAGE_READERS or self._is_closed:
            raise overloaded("too many pages are open: close some")
        reader = _Reader(is_allowed)
        self._readers.add(reader)
        if self._newest:
            reader.tell(self._newest)
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
        """Every stream ends."""
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
                    told, last = await self._board.events(last)
                    self._newest = told[0]
                    self._tell(b"".join(told))
                except Exception as error:  # a bug of ours: the next tick may do
                    logger.warning("the page could not be told anything: %s", str(error))
                await asyncio.sleep(self._tick_s)
        finally:
            self._task = None
            self._newest = b""
            self._rest()

    def _tell(self, data: bytes) -> None:
        for reader in list(self._readers):
            if not reader.is_allowed() or not reader.tell(data):
                self._readers.discard(reader)
                reader.drop()
