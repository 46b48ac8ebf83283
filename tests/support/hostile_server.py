"""A server on a Unix socket that shakes hands as it should and answers with mutants. Thread-safe."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.blocks.hashing import HASH_BYTES
from kvtier.errors import RemoteProtocolError
from kvtier.wire import messages as wire
from kvtier.wire.frames import HEADER_BYTES, encode_frame
from tests.support.actors import mutant

ARENA_BYTES = 1 << 20
_HEADER = struct.Struct("<IHHIIQ")
_LOOK_S = 0.05


class HostileServer:
    """Listens at `folder`/hostile.sock. Every reply may have a wrong value, be cut off, or be random bytes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.address = f"unix:{folder / 'hostile.sock'}"
        self.num_replies = 0
        self._rng = random.Random(seed)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / "hostile.sock"))
        self._listener.listen()
        self._listener.settimeout(_LOOK_S)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvtier-hostile", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._listener.accept()
                sock.settimeout(_LOOK_S)
                with sock, contextlib.suppress(OSError, EOFError, RemoteProtocolError):
                    self._answer_all(sock)

    def _answer_all(self, sock: socket.socket) -> None:
        self._receive(sock)
        self._welcome(sock)
        while not self._is_over.is_set():
            number, request = self._receive(sock)
            self.num_replies += 1
            sock.sendall(self._reply(number, request))

    def _welcome(self, sock: socket.socket) -> None:
        """Mostly as it should be, else with memory of another size, unsealed, or none."""
        rng = self._rng
        fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, ARENA_BYTES if rng.random() < 0.97 else ARENA_BYTES // 2)
            if rng.random() < 0.97:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            message = wire.Welcome("kvtier", rng.randbytes(16), b"", ARENA_BYTES, 1 << 20, rng.random() < 0.5)
            frame = encode_frame(0, wire.encode(message))
            if rng.random() < 0.03:
                frame = mutant(rng, message, b"")
            socket.send_fds(sock, [frame], [fd] * rng.choice((1, 1, 1, 1, 1, 1, 2, 5)))
        finally:
            os.close(fd)

    def _reply(self, number: int, request: wire.Message) -> bytes:
        rng = self._rng
        right = encode_frame(number, wire.encode(self._right_reply(request)))
        choice = rng.randrange(10)
        if choice < 4 or (isinstance(request, wire.Open) and rng.random() < 0.9):  # else few would get further
            return right
        changed = bytearray(mutant(rng, self._right_reply(request), b""))
        if choice < 9 and len(changed) >= HEADER_BYTES:
            changed[8:12] = number.to_bytes(4, "little")
        return bytes(changed)

    def _right_reply(self, request: wire.Message) -> wire.Message:
        rng = self._rng
        match request:
            case wire.Open():
                return wire.Opened(1)
            case wire.MatchRequest() | wire.ReserveRequest():
                count = min(len(request.hashes) // HASH_BYTES, rng.randrange(5)) + (rng.random() < 0.1)
                last = 2 * ARENA_BYTES if rng.random() < 0.2 else ARENA_BYTES // 2
                offsets = wire.pack_numbers(rng.randrange(last) for _ in range(count))
                if isinstance(request, wire.MatchRequest):
                    return wire.Matched(offsets, "all", rng.randrange(count + 1), 0)
                positions = wire.pack_numbers(rng.randrange(5) for _ in range(count))
                return wire.Reserved(positions, offsets, 0, 0, rng.randrange(3), "no room")
            case wire.ContainsRequest():
                return wire.Contained(rng.randbytes(len(request.hashes) // HASH_BYTES))
            case wire.Commit() | wire.Await() | wire.DropRequest():
                return wire.Counted(rng.choice((0, 1, 4, (1 << 64) - 1)))
        return wire.Done()

    def _receive(self, sock: socket.socket) -> tuple[int, wire.Message]:
        header = self._exactly(sock, HEADER_BYTES)
        _, _, _, number, body_bytes, _ = _HEADER.unpack(header)
        return number, wire.decode(self._exactly(sock, body_bytes))

    def _exactly(self, sock: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            try:
                part = sock.recv(nbytes - len(data))
            except TimeoutError:
                if self._is_over.is_set():
                    raise
                continue
            if not part:
                raise EOFError
            data += part
        return data
