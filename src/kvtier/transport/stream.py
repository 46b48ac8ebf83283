"""Frames over one connected socket, plain or TLS. One thread sends and receives on a stream at a time.

Timeouts are the socket's own (SO_RCVTIMEO, SO_SNDTIMEO), so a transfer costs one system call per chunk and no poll.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.errors import RemoteProtocolError, TierTimeout, TierUnavailable
from kvtier.latency_guard import give_way
from kvtier.sizes import format_size
from kvtier.transport.byte_budget import ByteBudget
from kvtier.wire.cipher import Seals
from kvtier.wire.frames import BufferList, Frame, FrameLimits, FrameReader, encode_frame, sealed_frame
from kvtier.wire.messages import Message, decode, encode

_MAX_VECTORS = 512  # well under IOV_MAX
_MIN_TIMEOUT_S = 0.001
_SLACK_S = 0.05
_ROOM_S = 10.0
_DRAIN_BYTES = 1 << 20
_SMALL_VIEW_BYTES = 16 << 10
_CACHED_BYTES = 1024 << 10  # received at once: small enough to be still in the CPU's cache for `taste`
_SEND_BYTES = 1 << 20  # handed to the kernel at once; more only makes the peer wait
_TIMEVAL = struct.Struct("ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(4)


@dataclass(frozen=True, slots=True)
class MinimumRate:
    """The slowest rate at which a peer may read or send a frame that has begun, after a grace period."""

    grace_s: float
    bytes_per_s: float

    def check(self, started_at: float, nbytes: int) -> None:
        """Raises `TierTimeout` if the peer moved too few bytes, `nbytes`, since `started_at`."""
        if time.monotonic() - started_at > self.grace_s + nbytes / self.bytes_per_s:
            raise TierTimeout("the peer is too slow")


class Stream:
    """Sends and receives frames. `place` says where payloads go (see `FrameReader`). Owns the socket.

    With a `pace`, the stream ends if a peer is slower than that for a frame. With a budget for `bodies`, a large body
    waits for room in it, and gives the room back when the next frame is received.
    """

    def __init__(
        self,
        sock: socket.socket,
        place: Callable[[int, Message, int], BufferList],
        limits: FrameLimits,
        taste: Callable[[memoryview, bool], None] = lambda piece, is_end: None,
    ) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._reader: FrameReader[Message] = FrameReader(decode, place, limits, taste, self._admit)
        self._timeout_s: float | None = None
        self.pace: MinimumRate | None = None
        self.bodies: ByteBudget | None = None
        self._body_bytes = 0
        self._seals: Seals | None = None
        self._frame_at = 0.0
        self._frame_bytes = 0
        self.passed_fds: list[int] = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.settimeout(None)

    @property
    def is_between_frames(self) -> bool:
        return self._reader.is_between_frames

    def set_limits(self, limits: FrameLimits) -> None:
        self._reader.limits = limits

    def encrypt(self, seals: Seals) -> None:
        """Encrypt both ways, from the next frame on."""
        self._seals = seals
        self._reader.seal = seals.received

    def set_timeout(self, timeout_s: float) -> None:
        """The longest that one system call may wait."""
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        seconds = max(timeout_s, _MIN_TIMEOUT_S)
        if self._tls is not None:  # the TLS layer retries by itself after a timeout of the socket
            self._tls.settimeout(seconds)
            return
        packed = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def start_tls(self, timeout_s: float) -> None:
        """The TLS handshake, if there is TLS. Raises `TierUnavailable` if it fails."""
        if self._tls is not None:
            self.set_timeout(timeout_s)
            with _translated():
                self._tls.do_handshake()

    def send(
        self,
        request: int,
        message: Message,
        payload: Sequence[memoryview] = (),
        deadline: float | None = None,
        pass_fd: int | None = None,
    ) -> None:
        """Send one frame, gathered from the views. With `deadline` (monotonic), raises `TierTimeout` past it."""
        give_way()
        if self._seals is not None:
            self._send_all(sealed_frame(self._seals.sent, request, encode(message), payload), deadline)
            return
        head = memoryview(encode_frame(request, encode(message), sum(map(len, payload))))
        if pass_fd is not None:
            # The descriptor must go with the first byte; a frame this small is never cut by the kernel.
            with _translated():
                socket.send_fds(self._sock, [head], [pass_fd])
            return
        self._send_all([head, *payload], deadline)

    def _send_all(self, left: BufferList, deadline: float | None) -> None:
        position = total = 0
        started_at = time.monotonic()
        with _translated():
            while position < len(left):
                self._wait_until(deadline)
                if self._tls is not None:
                    sent = self._tls.send(left[position][:_SEND_BYTES])
                else:
                    end, nbytes = position + 1, len(left[position])
                    while end < len(left) and nbytes < _SEND_BYTES and end - position < _MAX_VECTORS:
                        nbytes += len(left[end])
                        end += 1
                    sent = self._sock.sendmsg(left[position:end])
                total += sent
                if self.pace is not None:
                    self.pace.check(started_at, total)
                while position < len(left) and sent >= len(left[position]):
                    sent -= len(left[position])
                    position += 1
                if sent:
                    left[position] = left[position][sent:]

    def receive(self, deadline: float | None = None, takes_fds: bool = False) -> Frame[Message]:
        """The next frame. Raises `TierTimeout` past `deadline`, or if one system call waited for the whole timeout."""
        reader = self._reader
        self._let_go_of_body()
        while True:
            self._wait_until(deadline)
            want = reader.want()
            with _translated():
                if self._tls is not None:
                    received = self._tls.recv_into(want[0])
                elif takes_fds:
                    received = self._receive_with_fds(want)
                elif len(want) == 1 or len(want[1]) > _SMALL_VIEW_BYTES:
                    received = self._sock.recv_into(want[0], min(len(want[0]), _CACHED_BYTES))
                else:
                    received = self._sock.recvmsg_into(want[: _CACHED_BYTES // _SMALL_VIEW_BYTES])[0]
            give_way()
            if not received:
                raise TierUnavailable("the peer closed the connection")
            if self.pace is not None:
                self._keep_pace(received)
            frame = reader.advance(received)
            if frame is not None:
                return frame

    def _keep_pace(self, received: int) -> None:
        assert self.pace is not None
        if self._reader.is_between_frames:
            self._frame_at, self._frame_bytes = time.monotonic(), 0
        self._frame_bytes += received
        self.pace.check(self._frame_at, self._frame_bytes)

    def _admit(self, nbytes: int) -> None:
        """Wait for room for a large body; this time does not count against the peer."""
        if self.bodies is None:
            return
        started_at = time.monotonic()
        if not self.bodies.take(nbytes, _ROOM_S):
            raise RemoteProtocolError(
                f"there was no room for a request of {format_size(nbytes)} within {_ROOM_S:.0f} s, because of other "
                "large requests: try again"
            )
        self._body_bytes = nbytes
        self._frame_at += time.monotonic() - started_at

    def _let_go_of_body(self) -> None:
        if self._body_bytes and self.bodies is not None:
            self.bodies.give_back(self._body_bytes)
            self._body_bytes = 0

    def is_readable(self) -> bool:
        """Whether bytes or the end can be read; on an idle connection, this shows that the peer has disconnected."""
        return bool(self._poll.poll(0))

    def stop_receiving(self) -> None:
        """Wake threads that wait for bytes; they see the end. Sending still works."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RD)

    def shut_down(self) -> None:
        """Wake all threads blocked on the stream; they see the end."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def drain(self, timeout_s: float) -> None:
        """Signal the end, then read the rest that the peer sends, so that it does not lose our last message.

        Returns after `timeout_s`, even if more arrives.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError, ValueError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            left = _DRAIN_BYTES
            while left > 0 and (left_s := deadline - time.monotonic()) > 0:
                self.set_timeout(left_s)
                received = len(self._sock.recv(1 << 16))
                if not received:
                    return
                left -= received

    def close(self) -> None:
        self._reader.drop()
        self._let_go_of_body()
        self._sock.close()
        for fd in self.passed_fds:
            os.close(fd)
        self.passed_fds.clear()

    def _wait_until(self, deadline: float | None) -> None:
        if deadline is None:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TierTimeout("no answer within the deadline")
        # Each change is a system call, so the socket's own limit may be a little too long.
        if self._timeout_s is None or not left_s <= self._timeout_s <= left_s + _SLACK_S:
            self.set_timeout(left_s + _SLACK_S / 2)

    def _receive_with_fds(self, want: BufferList) -> int:
        received, ancillary, _, _ = self._sock.recvmsg_into(want, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.passed_fds.extend(fds)
        return received


class _translated(contextlib.AbstractContextManager[None]):
    """A scope that turns socket errors into tier errors."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)):
            raise TierTimeout("no answer within the deadline") from error
        if isinstance(error, ssl.SSLError):
            raise TierUnavailable(f"TLS failed: {error.reason or error}") from error
        if isinstance(error, OSError):
            raise TierUnavailable(f"the connection broke: {error.strerror or error}") from error
        if isinstance(error, ValueError):  # the socket was closed by another thread
            raise RemoteProtocolError(str(error)) from error
