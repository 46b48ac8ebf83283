"""Processes that read large bodies for the HTTP server. One event loop.

A parser holds the interpreter lock while it works: in a thread of this process it would delay every stream. The
processes start with the first large body and end with the server. Bodies of megabytes have separate processes, so a
long prompt does not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kvtier.api.body_messages import LENGTH_BYTES, BodyReply, ReadBody, decode_reply, framed, length_of
from kvtier.api.http_error import HttpError, overloaded
from kvtier.api.limits import MAX_UNREAD_BODIES_BYTES, QUICK_BODY_BYTES, READ_TIMEOUT_S

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 2
"""Processes for bodies of megabytes, and for smaller ones."""

_STREAM_LIMIT_BYTES = 1 << 20
_END_S = 5.0
_LOOK_S = 0.01
_IDLE_S = 300.0
"""An idle process ends after this long. The next large body then waits half a second for a new one."""


class LargeBodies:
    """`read` may be called from any task; `close` once no task reads any more."""

    timeout_s = READ_TIMEOUT_S
    idle_s = _IDLE_S

    def __init__(self) -> None:
        self._under_way: set[asyncio.Future[Any]] = set()
        self._quick = _Readers()
        self._slow = _Readers()

    async def read(self, question: ReadBody, pieces: Sequence[bytes]) -> BodyReply:
        """Raises `HttpError` if too many bodies wait, if reading takes too long, or if the process dies.

        If the caller is cancelled, a small body is still read to its end: starting a new process would take longer.
        """
        is_quick = question.num_bytes <= QUICK_BODY_BYTES
        readers = self._quick if is_quick else self._slow
        await readers.wait(question.num_bytes)
        reading = asyncio.ensure_future(self._read(readers, question, pieces))
        self._keep(reading)
        reading.add_done_callback(lambda _: readers.places.release())
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            if not is_quick:
                reading.cancel()
            raise

    async def _read(self, readers: _Readers, question: ReadBody, pieces: Sequence[bytes]) -> BodyReply:
        process = readers.idle.pop() if readers.idle else _Process()
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await process.read(question, pieces)
        except TimeoutError as error:
            await process.kill()
            raise HttpError(413, "the body takes too long to read", "body_too_large") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            logger.warning("a process died while it read a body of %d bytes", question.num_bytes)
            await process.kill()
            raise HttpError(413, "the body cannot be read", "body_too_large") from error
        except BaseException:  # the client is gone: the process's next reply would not belong to the next body
            await process.kill()
            raise
        readers.idle.append(process)
        asyncio.get_running_loop().call_later(self.idle_s, self._end_if_idle, readers, process, process.num_read)
        return reply

    def _end_if_idle(self, readers: _Readers, process: _Process, num_read: int) -> None:
        if process in readers.idle and process.num_read == num_read:
            readers.idle.remove(process)
            self._keep(asyncio.ensure_future(process.close()))

    def _keep(self, work: asyncio.Future[Any]) -> None:
        self._under_way.add(work)
        work.add_done_callback(self._forget)

    def _forget(self, work: asyncio.Future[Any]) -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # retrieved here, since the client may be gone

    async def close(self) -> None:
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for readers in (self._quick, self._slow):
            while readers.idle:
                await readers.idle.pop().close()


class _Readers:
    """The processes for one size class of bodies, and the bodies that wait for a process."""

    def __init__(self) -> None:
        self.idle: list[_Process] = []
        self.places = asyncio.Semaphore(_NUM_PROCESSES)
        self._waiting_bytes = 0

    async def wait(self, num_bytes: int) -> None:
        """Wait for a process. Raises `HttpError` if waiting bodies take too much memory."""
        if self._waiting_bytes and self._waiting_bytes + num_bytes > MAX_UNREAD_BODIES_BYTES:
            raise overloaded("too many large bodies are waiting to be read")
        self._waiting_bytes += num_bytes
        try:
            await self.places.acquire()
        finally:
            self._waiting_bytes -= num_bytes


class _Process:
    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtier.api.reading", str(theirs.fileno())],  # -P: as for all parts
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.num_read = 0

    async def read(self, question: ReadBody, pieces: Sequence[bytes]) -> BodyReply:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._sock, limit=_STREAM_LIMIT_BYTES)
        self.num_read += 1
        reader, writer = self._streams
        for piece in (*framed(question), *pieces):
            writer.write(piece)
            await writer.drain()  # as fast as the process reads, so the loop does not copy all at once
        return decode_reply(await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES))))

    async def kill(self) -> None:
        self._process.kill()
        await self.close()

    async def close(self) -> None:
        """Close the socket, which ends the process."""
        if self._streams is None:
            self._sock.close()
        else:
            writer = self._streams[1]
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        deadline = asyncio.get_running_loop().time() + _END_S
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                self._process.kill()
            await asyncio.sleep(_LOOK_S)
