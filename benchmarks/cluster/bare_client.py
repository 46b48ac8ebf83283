"""A bare loop of `sendmsg` and `recvmsg_into` on one socket per node: what sockets in Python can do with a cluster.

It knows which node has which key, and looks at nothing in an answer but its length. With checksums it also writes an
XXH3 behind each block and verifies it: the least that a client with checksums needs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import xxhash

from kvtier.stores.valkey.node import NodeAddress
from kvtier.stores.valkey.resp import command, command_around

_IN_FLIGHT = 8
_CHECKSUM_BYTES = 8


class BareClient:
    """`owners[i]` is the node of `keys[i]`; all blocks have `block_bytes`."""

    def __init__(
        self, keys: Sequence[bytes], owners: Sequence[NodeAddress], block_bytes: int, *, has_checksums: bool = False
    ) -> None:
        self._keys = keys
        self._has_checksums = has_checksums
        self._value_bytes = block_bytes + (_CHECKSUM_BYTES if has_checksums else 0)
        self._head_bytes = len(b"$%d\r\n" % self._value_bytes)
        self._shares = {
            owner: [position for position, one in enumerate(owners) if one == owner] for owner in set(owners)
        }
        self._sockets = {owner: socket.create_connection((owner.host, owner.port)) for owner in self._shares}
        for sock in self._sockets.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, blocks: Sequence[memoryview]) -> None:
        def act(sock: socket.socket, positions: Sequence[int]) -> None:
            for first in range(0, len(positions), _IN_FLIGHT):
                some = positions[first : first + _IN_FLIGHT]
                parts: list[bytes | memoryview] = []
                for position in some:
                    before, after = command_around((b"SET", self._keys[position]), self._value_bytes, ())
                    parts += [before, blocks[position], self._checksum(blocks[position]), after]
                _send_all(sock, parts)
                _receive_all(sock, [memoryview(bytearray(len(some) * len(b"+OK\r\n")))])

        self._on_each(act)

    def get(self, into: Sequence[memoryview]) -> None:
        def act(sock: socket.socket, positions: Sequence[int]) -> None:
            end_bytes = self._value_bytes - len(into[0]) + 2
            ends = [memoryview(bytearray(end_bytes)) for _ in range(_IN_FLIGHT)]
            head = memoryview(bytearray(self._head_bytes))
            for first in range(0, len(positions), _IN_FLIGHT):
                some = positions[first : first + _IN_FLIGHT]
                sock.sendall(b"".join(command(b"GET", self._keys[position]) for position in some))
                views: list[memoryview] = []
                for position, end in zip(some, ends, strict=False):
                    views += [head, into[position], end]
                _receive_all(sock, views)
                for position, end in zip(some, ends, strict=False):
                    if end[:-2] != self._checksum(into[position]):
                        raise AssertionError("a block came back with another checksum")

        self._on_each(act)

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()

    def _checksum(self, block: memoryview) -> bytes:
        return xxhash.xxh3_64_digest(block) if self._has_checksums else b""

    def _on_each(self, act: Callable[[socket.socket, Sequence[int]], None]) -> None:
        threads = [
            threading.Thread(target=act, args=(self._sockets[owner], positions))
            for owner, positions in self._shares.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _send_all(sock: socket.socket, parts: list[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        sent = sock.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _receive_all(sock: socket.socket, views: list[memoryview]) -> None:
    left = list(views)
    while left:
        received = sock.recvmsg_into(left)[0]
        if not received:
            raise RuntimeError("a node ended")
        while left and received >= len(left[0]):
            received -= len(left.pop(0))
        if received:
            left[0] = left[0][received:]
