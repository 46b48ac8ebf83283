"""A TCP proxy before a cache server that is slow, silent, cuts connections or tells lies. Everything may be switched
while it is in use. Thread-safe.

Frames from the server are read whole, changed and sent on; what clients say goes through as it is. A lie is a function
from a reply and its payload to the bytes that are sent in their place.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec

from kvtier.errors import RemoteProtocolError
from kvtier.wire import messages as wire
from kvtier.wire.frames import HEADER_BYTES, encode_frame

Lie = Callable[[int, wire.Message, bytes], bytes]
"""Given a frame's request number, message and payload, returns the bytes that the client gets."""

_HEADER = struct.Struct("<IHHIIQ")
_PIECE_BYTES = 16 << 10
_LOOK_S = 0.05


class LyingProxy:
    """Listens on loopback and passes on to `target` (`tcp://host:port`).

    `bytes_per_s` bounds each connection each way; `delay_s` is added to every frame of the server; with `is_silent`
    nothing of the server's passes; `lie` is told in place of every frame, once the handshake is over. `num_lies` counts
    frames that were not passed on as they were.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").removeprefix("tcp:").lstrip("/").rpartition(":")
        self._target = (host, int(port))
        self.bytes_per_s = float("inf")
        self.delay_s = 0.0
        self.is_silent = False
        self.lie: Lie | None = None
        self.num_lies = 0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def heal(self) -> None:
        """Pass on everything as it is, at full speed."""
        self.bytes_per_s = float("inf")
        self.delay_s = 0.0
        self.is_silent = False
        self.lie = None

    def cut(self) -> None:
        """End every connection now."""
        with self._lock:
            for pair in self._pairs:
                pair.shut_down()

    def cut_busiest(self) -> None:
        """End the connection over which a client has sent the most."""
        with self._lock:
            max(self._pairs, key=lambda pair: pair.sent_bytes).shut_down()

    def close(self) -> None:
        self._is_over.set()
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, name="kvtier-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            near.settimeout(None)
            try:
                far = socket.create_connection(self._target, 1.0)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(near, far)
            with self._lock:
                self._pairs.add(pair)
            self._start(self._pass_requests, pair)
            self._start(self._pass_replies, pair)

    def _pass_requests(self, pair: _Pair) -> None:
        with self._ending(pair):
            while piece := pair.near.recv(_PIECE_BYTES):
                pair.sent_bytes += len(piece)
                self._send(pair.far, piece)

    def _pass_replies(self, pair: _Pair) -> None:
        with self._ending(pair):
            while True:
                header = _receive(pair.far, HEADER_BYTES)
                _, _, _, request, body_bytes, payload_bytes = _HEADER.unpack(header)
                body = _receive(pair.far, body_bytes)
                payload = _receive(pair.far, payload_bytes)
                if self.delay_s:
                    self._is_over.wait(self.delay_s)
                while self.is_silent and not self._is_over.is_set():
                    self._is_over.wait(_LOOK_S)
                data = header + body + payload
                lie = self.lie
                if lie is not None and request:
                    told = lie(request, wire.decode(body), payload)
                    self.num_lies += told != data
                    data = told
                self._send(pair.near, data)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        for first in range(0, len(data), _PIECE_BYTES):
            piece = data[first : first + _PIECE_BYTES]
            if self.bytes_per_s != float("inf"):
                self._is_over.wait(len(piece) / self.bytes_per_s)
            sock.sendall(piece)

    @contextlib.contextmanager
    def _ending(self, pair: _Pair) -> Iterator[None]:
        """One side's end is both sides'; the second of the two threads closes the sockets."""
        with contextlib.suppress(OSError, EOFError, RemoteProtocolError):
            yield
        with self._lock:
            pair.shut_down()
            pair.num_users -= 1
            if not pair.num_users:
                self._pairs.discard(pair)
                pair.near.close()
                pair.far.close()


class _Pair:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far
        self.num_users = 2
        self.sent_bytes = 0

    def shut_down(self) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = sock.recv(min(nbytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


# --- lies ----------------------------------------------------------------------------------------------------------


def wrong_checksums(request: int, message: wire.Message, payload: bytes) -> bytes:
    """Every block comes with another's checksum."""
    if isinstance(message, wire.Blocks) and message.count:
        flipped = bytes(byte ^ 1 for byte in message.checksums)
        message = msgspec.structs.replace(message, checksums=flipped)
    return _framed(request, message, payload)


def wrong_bytes(request: int, message: wire.Message, payload: bytes) -> bytes:
    """A bit of the last block is another."""
    if payload:
        payload = payload[:-1] + bytes([payload[-1] ^ 1])
    return _framed(request, message, payload)


def swapped_blocks(request: int, message: wire.Message, payload: bytes) -> bytes:
    """The first two blocks have changed places, with their checksums."""
    if isinstance(message, wire.Blocks) and message.count > 1:
        size = len(payload) // message.count
        payload = payload[size : 2 * size] + payload[:size] + payload[2 * size :]
        sums = message.checksums
        message = msgspec.structs.replace(message, checksums=sums[8:16] + sums[:8] + sums[16:])
    return _framed(request, message, payload)


def short_payloads(request: int, message: wire.Message, payload: bytes) -> bytes:
    """One byte less than the blocks have, and the header says so."""
    return _framed(request, message, payload[:-1])


def missing_bytes(request: int, message: wire.Message, payload: bytes) -> bytes:
    """The header promises more than comes: the reader waits for the rest."""
    whole = _framed(request, message, payload)
    return whole[: len(whole) - len(payload) // 2] if payload else whole


def too_many_blocks(request: int, message: wire.Message, payload: bytes) -> bytes:
    """More blocks than anybody asked for."""
    if isinstance(message, wire.Blocks) and message.count:
        size = len(payload) // message.count
        more = msgspec.structs.replace(
            message, count=message.count + 1, checksums=message.checksums + message.checksums[-8:]
        )
        return _framed(request, more, payload + payload[-size:])
    if isinstance(message, wire.Matched) and message.offsets:
        return _framed(request, msgspec.structs.replace(message, offsets=message.offsets * 64), payload)
    return _framed(request, message, payload)


def too_few_blocks(request: int, message: wire.Message, payload: bytes) -> bytes:
    """Half of what was matched, as if it were all."""
    if isinstance(message, wire.Blocks) and message.count > 1:
        size = len(payload) // message.count
        count = message.count // 2
        message = msgspec.structs.replace(message, count=count, checksums=message.checksums[: 8 * count])
        payload = payload[: size * count]
    return _framed(request, message, payload)


def other_blocks(request: int, message: wire.Message, payload: bytes) -> bytes:
    """Blocks of another place in the prompt."""
    if isinstance(message, wire.Blocks) and message.count:
        message = msgspec.structs.replace(message, first=message.first + 1)
    return _framed(request, message, payload)


def other_answers(request: int, message: wire.Message, payload: bytes) -> bytes:
    """An answer without a request."""
    return _framed(request, wire.Counted(1 << 40), b"")


def other_numbers(request: int, message: wire.Message, payload: bytes) -> bytes:
    """The answer to another request."""
    return _framed(request + 1, message, payload)


def garbage(request: int, message: wire.Message, payload: bytes) -> bytes:
    """Bytes that mean nothing."""
    return random.Random(request).randbytes(200)


def another_version(request: int, message: wire.Message, payload: bytes) -> bytes:
    """The message of a server with another version of the protocol."""
    framed = bytearray(_framed(request, message, payload))
    framed[4] ^= 0x40
    return bytes(framed)


def refusals(request: int, message: wire.Message, payload: bytes) -> bytes:
    """No to everything."""
    return _framed(request, wire.Failure("refused", "not today"), b"")


LIES: dict[str, Lie] = {
    lie.__name__: lie
    for lie in (
        wrong_checksums,
        wrong_bytes,
        swapped_blocks,
        short_payloads,
        missing_bytes,
        too_many_blocks,
        too_few_blocks,
        other_blocks,
        other_answers,
        other_numbers,
        garbage,
        another_version,
        refusals,
    )
}
"""Every lie by its name."""


def _framed(request: int, message: wire.Message, payload: bytes) -> bytes:
    return encode_frame(request, wire.encode(message), len(payload)) + payload
