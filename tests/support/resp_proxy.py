"""A proxy before a node of a cluster that tells lies: whole replies of the node are changed, swapped or cut short.

What clients say goes through as it is. Everything may be switched while it is in use. Thread-safe.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Lie = Callable[[bytes], bytes | None]
"""Given a whole reply, returns the bytes for the client; None ends the connection in the middle of it."""


class LyingNode:
    """Listens on loopback, passes on to the port `target`. If it `swaps`, of two large replies the second is first."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target: int | None = None
        self.lie: Lie | None = None
        self.swaps = False
        self.num_lies = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def heal(self) -> None:
        self.lie, self.swaps = None, False

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _start(self, act: Callable[..., None], *words: object) -> None:
        thread = threading.Thread(target=act, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                self._sockets.append(outer)
                assert self.target is not None
                try:
                    inner = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    outer.close()
                    continue
                self._sockets.append(inner)
                self._start(self._pass_on, outer, inner)
                self._start(self._answer, inner, outer)

    def _pass_on(self, outer: socket.socket, inner: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := outer.recv(1 << 16):
                inner.sendall(data)
        _shut_down(outer, inner)

    def _answer(self, inner: socket.socket, outer: socket.socket) -> None:
        kept: bytes | None = None
        with contextlib.suppress(OSError, EOFError, ValueError):
            for reply in _replies(inner):
                told: bytes | None = reply
                if len(reply) > 1000:
                    if self.swaps and kept is None:
                        kept = reply
                        continue
                    if kept is not None:
                        told, kept = reply + kept, None
                        self.num_lies += 1
                    elif self.lie is not None:
                        told = self.lie(reply)
                        self.num_lies += 1
                elif kept is not None:
                    told, kept = kept + reply, None
                if told is None:
                    outer.sendall(reply[: len(reply) // 2])
                    break
                outer.sendall(told)
        _shut_down(outer, inner)


def _shut_down(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _replies(sock: socket.socket) -> Iterator[bytes]:
    """Whole replies, one after the other."""
    buffer = bytearray()

    def fill() -> None:
        data = sock.recv(1 << 16)
        if not data:
            raise EOFError
        buffer.extend(data)

    def line_end(first: int) -> int:
        while (found := buffer.find(b"\r\n", first)) < 0:
            fill()
        return found + 2

    def end_of(first: int) -> int:
        end = line_end(first)
        kind, count = buffer[first : first + 1], bytes(buffer[first + 1 : end - 2])
        if kind in (b"$", b"=", b"!"):
            end += int(count) + 2 if int(count) >= 0 else 0
            while len(buffer) < end:
                fill()
        elif kind in (b"*", b"%", b"~", b">"):
            for _ in range(max(0, int(count)) * (2 if kind == b"%" else 1)):
                end = end_of(end)
        return end

    while True:
        end = end_of(0)
        yield bytes(buffer[:end])
        del buffer[:end]
