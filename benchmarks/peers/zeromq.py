"""ZeroMQ: a dictionary behind a ROUTER socket, over tcp and ipc (a process) and inproc (a thread).

One message per block, pipelined over one DEALER socket that sends REQ's envelope. copy=True moves bytes
objects through pyzmq; copy=False hands libzmq the caller's buffer on the way out and keeps its frames on
the way in. Either way get() ends with one placement copy into the caller's buffer.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

from benchmarks.peers import ChildServerPeer, Peer, PeerError, free_port


def serve(endpoint: str, copy: bool, keep_frames: bool, context: Any = None) -> None:
    """Store and return blocks until told to stop. keep_frames: store libzmq's own received frames."""
    zmq: Any = importlib.import_module("zmq")

    socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.set_hwm(0)
    socket.bind(endpoint)
    blocks: dict[bytes, Any] = {}
    with socket:
        while True:
            frames = socket.recv_multipart(copy=copy)
            route, empty, operation, key = (bytes(frame) for frame in frames[:4])
            reply: list[Any] = [route, empty, b"ok"]
            if operation == b"set":
                blocks[key] = frames[4] if keep_frames or copy else bytes(frames[4].buffer)
            elif operation == b"get":
                reply = [route, empty, blocks[key]] if key in blocks else [route, empty, b"", b"missing"]
            socket.send_multipart(reply, copy=copy)
            if operation == b"stop":
                return


class ZeroMQ(ChildServerPeer):
    """One transport of one server, in one of pyzmq's two copying modes."""

    def __init__(self, transport: str, copy: bool) -> None:
        super().__init__()
        self.name = f"zeromq {transport} copy={copy}"
        self.transport = transport
        self._copy = copy
        self._socket: Any = None

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        zmq: Any = importlib.import_module("zmq")

        context = zmq.Context()
        self.on_close(lambda: context.destroy(linger=0))
        if self.transport == "inproc":
            # Frames received over inproc may be the caller's own memory: the server must copy them.
            endpoint = f"inproc://kvtier-peer-{id(self)}"
            thread = threading.Thread(target=serve, args=(endpoint, self._copy, False, context), daemon=True)
            thread.start()
            self.on_close(lambda: thread.join(10.0))
        else:
            address = f"127.0.0.1:{free_port()}" if self.transport == "tcp" else self.directory() / "zmq.sock"
            endpoint = f"{self.transport}://{address}"
            self.spawn_module("benchmarks.peers.zeromq", endpoint, str(int(self._copy)))
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)
        if self.transport == "inproc":
            self.on_close(lambda: self._socket.send_multipart([b"", b"stop", b""]))
        self._socket.send_multipart([b"", b"ping", b""])
        self.wait_until(lambda: self._socket.poll(100))
        self._socket.recv_multipart()

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._socket.send_multipart([b"", b"set", key, block], copy=self._copy)
        for _ in keys:
            self._socket.recv_multipart()

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        for key in keys:
            self._socket.send_multipart([b"", b"get", key])
        for target in into:
            frames = self._socket.recv_multipart(copy=self._copy)
            if len(frames) != 2:
                raise PeerError("ZeroMQ's server does not have a block it was given.")
            target[:] = frames[1] if self._copy else frames[1].buffer


def peers() -> list[Peer]:
    """tcp, ipc and inproc, each with pyzmq copying and not copying."""
    return [ZeroMQ(transport, copy) for transport in ("tcp", "ipc", "inproc") for copy in (True, False)]


if __name__ == "__main__":
    _endpoint, _copying = sys.argv[1], bool(int(sys.argv[2]))
    serve(_endpoint, _copying, keep_frames=not _copying)
    os._exit(0)
