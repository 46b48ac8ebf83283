"""Redis: redis-server without persistence, on TCP and on a Unix socket.

Two clients for each: redis-py with hiredis (pipelined SET from the caller's buffers, MGET, one placement
copy), and a bare RESP client that receives straight into the caller's buffers.
"""

from __future__ import annotations

import shutil
import socket
from typing import Any

from benchmarks.peers import ChildServerPeer, Peer, PeerError, PeerUnavailable, free_port

_SET_WINDOW = 16  # blocks per pipeline
_GET_WINDOW = 4  # blocks per MGET: more only grows what redis-py holds before the placement copy
_RECEIVE_AHEAD = 64  # GET requests the bare client keeps in flight


class _RedisServer(ChildServerPeer):
    """Starts redis-server; the subclasses are its clients."""

    client = ""

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.transport = transport
        self.name = f"redis {transport} {self.client}"
        self._port = 0
        self._path = ""

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise PeerUnavailable("redis-server is not installed.")
        self._import()
        quiet = ["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(self.directory())]
        if self.transport == "tcp":
            self._port = free_port()
            where = ["--bind", "127.0.0.1", "--port", str(self._port)]
        else:
            self._path = str(self.directory() / "redis.sock")
            where = ["--port", "0", "--unixsocket", self._path]
        self.spawn([program, *where, *quiet])
        self.wait_until(self._probe)
        self._connect()

    def _dial(self) -> socket.socket:
        if self.transport == "tcp":
            connection = socket.create_connection(("127.0.0.1", self._port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        return connection

    def _probe(self) -> bool:
        with self._dial() as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16) == b"+PONG\r\n"

    def _import(self) -> None:
        """Import what the client needs, before a server is started in vain."""

    def _connect(self) -> None:
        raise NotImplementedError


class RedisPy(_RedisServer):
    """redis-py with hiredis' parser."""

    client = "redis-py"
    _redis: Any

    def _import(self) -> None:
        import hiredis  # noqa: F401
        import redis  # noqa: F401

    def _connect(self) -> None:
        from redis import ConnectionPool, Redis
        from redis.connection import Connection, Encoder, PythonRespSerializer, UnixDomainSocketConnection

        # hiredis' packer would join each command into new bytes; this one sends the caller's buffers.
        packer = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode)
        if self.transport == "tcp":
            where: dict[str, Any] = {"host": "127.0.0.1", "port": self._port, "connection_class": Connection}
        else:
            where = {"path": self._path, "connection_class": UnixDomainSocketConnection}
        self._redis = Redis(connection_pool=ConnectionPool(command_packer=packer, **where))
        self.on_close(self._redis.close)
        self._redis.ping()

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        pairs = list(zip(keys, blocks, strict=True))
        for start in range(0, len(pairs), _SET_WINDOW):
            with self._redis.pipeline(transaction=False) as pipeline:
                for key, block in pairs[start : start + _SET_WINDOW]:
                    pipeline.set(key, block)
                pipeline.execute()

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        for start in range(0, len(keys), _GET_WINDOW):
            values = self._redis.mget(keys[start : start + _GET_WINDOW])
            for target, value in zip(into[start : start + _GET_WINDOW], values, strict=True):
                if value is None:
                    raise PeerError("Redis does not have a block it was given.")
                target[:] = value


class RedisRecvInto(_RedisServer):
    """A bare RESP client: sends the caller's buffers, and receives into them."""

    client = "recv_into"
    _socket: socket.socket
    _reader: Any

    def _connect(self) -> None:
        self._socket = self._dial()
        self.on_close(self._socket.close)
        self._reader = self._socket.makefile("rb", buffering=65536)
        self.on_close(self._reader.close)

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        end = b""
        for key, block in zip(keys, blocks, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, block.nbytes)
            self._socket.sendall(end + head)
            self._socket.sendall(block)
            end = b"\r\n"
        self._socket.sendall(end)
        for _ in keys:
            answer = self._reader.readline()
            if answer != b"+OK\r\n":
                raise PeerError(f"Redis refused a block: {answer!r}.")

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        sent = 0
        for index, target in enumerate(into):
            if sent < len(keys) and sent - index < _RECEIVE_AHEAD // 2:
                ahead = keys[sent : index + _RECEIVE_AHEAD]
                requests = (b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in ahead)
                self._socket.sendall(b"".join(requests))
                sent += len(ahead)
            answer = self._reader.readline()
            if answer != b"$%d\r\n" % target.nbytes:
                raise PeerError(f"Redis does not have a block it was given: {answer!r}.")
            # BufferedReader drains what it holds, then reads the rest straight into the target.
            if self._reader.readinto(target) != target.nbytes or self._reader.read(2) != b"\r\n":
                raise PeerError("Redis closed the connection inside a block.")


def peers() -> list[Peer]:
    """Both clients on both transports."""
    return [client(transport) for transport in ("tcp", "unix") for client in (RedisPy, RedisRecvInto)]
