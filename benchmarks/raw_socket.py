"""A bare `sendmsg` / `recv_into` loop between two processes over TCP: the limit of a socket in Python.

The other process holds the blocks. `send` and `receive` move all of them once, over one or several connections.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from multiprocessing.synchronize import Event

from benchmarks.harness import BlockMemory

_MAX_VECTORS = 64


class RawPeer:
    """Owns the other process and `num_connections` connections to it."""

    def __init__(self, num_blocks: int, block_bytes: int, num_connections: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        ready = context.Event()
        self._process = context.Process(
            target=_serve, args=(port, num_blocks, block_bytes, num_connections, ready), daemon=True
        )
        self._process.start()
        if not ready.wait(60):
            raise RuntimeError("the raw peer did not start")
        self._sockets = []
        for _ in range(num_connections):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)

    def get(self, into: list[memoryview]) -> None:
        self._on_all(b"G", into)

    def set(self, blocks: list[memoryview]) -> None:
        self._on_all(b"S", blocks)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._process.join(10)

    def _on_all(self, command: bytes, blocks: list[memoryview]) -> None:
        parts = _parts(blocks, len(self._sockets))
        if len(parts) == 1:
            _move(self._sockets[0], command, parts[0])
            return
        threads = [
            threading.Thread(target=_move, args=(sock, command, part))
            for sock, part in zip(self._sockets, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _move(sock: socket.socket, command: bytes, blocks: list[memoryview]) -> None:
    sock.sendall(command)
    if command == b"G":
        _receive(sock, blocks)
    else:
        _send(sock, blocks)
        if sock.recv(1) != b"D":
            raise RuntimeError("the raw peer ended")


def _send(sock: socket.socket, blocks: list[memoryview]) -> None:
    left = list(blocks)
    position = 0
    while position < len(left):
        sent = sock.sendmsg(left[position : position + _MAX_VECTORS])
        while position < len(left) and sent >= len(left[position]):
            sent -= len(left[position])
            position += 1
        if sent:
            left[position] = left[position][sent:]


def _receive(sock: socket.socket, blocks: list[memoryview]) -> None:
    for block in blocks:
        left = block
        while left:
            received = sock.recv_into(left)
            if not received:
                raise RuntimeError("the raw peer ended")
            left = left[received:]


def _parts(blocks: list[memoryview], count: int) -> list[list[memoryview]]:
    bounds = [len(blocks) * part // count for part in range(count + 1)]
    return [blocks[bounds[part] : bounds[part + 1]] for part in range(count)]


def _serve(port: int, num_blocks: int, block_bytes: int, num_connections: int, ready: Event) -> None:
    memory = BlockMemory(num_blocks, block_bytes, seed=1)
    with socket.create_server(("127.0.0.1", port)) as listener:
        ready.set()
        threads = []
        for part in _parts(memory.blocks, num_connections):
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=_answer, args=(sock, part)))
            threads[-1].start()
        for thread in threads:
            thread.join()


def _answer(sock: socket.socket, blocks: list[memoryview]) -> None:
    with sock, contextlib.suppress(ConnectionError, RuntimeError):
        while command := sock.recv(1):
            if command == b"G":
                _send(sock, blocks)
            else:
                _receive(sock, blocks)
                sock.sendall(b"D")
