"""Processes that read large bodies for the HTTP server. One event loop.

A parser holds the interpreter while it works: in a thread of this process it would hold up every stream. The processes
are started when the first large body comes, and end with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence

from kvtier.api.body_messages import LENGTH_BYTES, BodyReply, ReadBody, decode_reply, framed, length_of
from kvtier.api.http_error import HttpError
from kvtier.api.limits import READ_TIMEOUT_S

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 2
_STREAM_LIMIT_BYTES = 1 << 20
_END_S = 5.0
_IDLE_S = 300.0
"""A process that has nothing to read for so long ends. The next large body waits half a second for another one."""


class LargeBodies:
    """`read` from any task; `close` once nothing is read any more."""

    timeout_s = READ_TIMEOUT_S
    idle_s = _IDLE_S

    def __init__(self) -> None:
        self._ending: set[asyncio.Future[None]] = set()
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(_NUM_PROCESSES)

    async def read(self, question: ReadBody, pieces: Sequence[bytes]) -> BodyReply:
        """Raises a `HttpError` if it takes too long, or if the process dies of it."""
        async with self._places:
            process = self._idle.pop() if self._idle else _Process()
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
            except BaseException:  # whoever asked is gone: what comes next on its socket is not for the next one
                await process.kill()
                raise
            self._idle.append(process)
            asyncio.get_running_loop().call_later(self.idle_s, self._end_if_idle, process, process.num_read)
            return reply

    def _end_if_idle(self, process: _Process, num_read: int) -> None:
        if process in self._idle and process.num_read == num_read:
            self._idle.remove(process)
            ending = asyncio.ensure_future(process.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        while self._idle:
            await self._idle.pop().close()


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
            await writer.drain()  # each as the process reads: the loop does not copy all of them at once
        return decode_reply(await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES))))

    async def kill(self) -> None:
        self._process.kill()
        await self.close()

    async def close(self) -> None:
        """It ends with its socket."""
        if self._streams is None:
            self._sock.close()
        else:
            writer = self._streams[1]
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
