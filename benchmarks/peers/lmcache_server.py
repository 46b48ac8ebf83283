"""LMCache: its lm:// server over TCP, and its multiprocess daemon with blocks in shared memory.

Both servers are LMCache's own, run by the interpreter in KVTIER_BENCH_LMCACHE_PYTHON (else this one), so
that torch stays out of this process. The clients here speak LMCache's wire formats directly and receive
into, or copy straight to, the caller's buffers, where LMCache's own would fill tensors to be copied.
"""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
import socket
import struct
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers import ChildServerPeer, Peer, PeerError, PeerUnavailable, can_connect, free_port

_CHUNK = 16  # the daemon's tokens per block
_TIMEOUT_S = 60.0
_OPERATIONS = {
    "lookup": 8, "wait_prefetch_status": 10, "end_session": 13, "register": 14, "prepare_store": 16,
    "commit_store": 17, "prepare_retrieve": 18, "commit_retrieve": 19, "clear": 20,
}  # fmt: skip
_ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


def _interpreter() -> str:
    python = os.environ.get("KVTIER_BENCH_LMCACHE_PYTHON", sys.executable)
    check = [python, "-c", "import lmcache.v1"]
    if shutil.which(python) is None or subprocess.run(check, capture_output=True, timeout=120).returncode:
        raise PeerUnavailable("LMCache is not installed (point KVTIER_BENCH_LMCACHE_PYTHON at its python).")
    return python


class LMCacheServer(ChildServerPeer):
    """PUT and GET against `python -m lmcache.v1.server`."""

    name = "lmcache lm:// server"
    transport = "tcp"
    _request = struct.Struct("9i150s")  # command, length, format, dtype, location, four dimensions, key
    _reply = struct.Struct("9i")  # code, length, ...
    _put, _get, _exist, _success, _format, _uint8 = 1, 2, 3, 200, 1, 6
    _ahead = 16  # GET requests in flight
    _socket: socket.socket
    _reader: Any

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        port = free_port()
        self.spawn([_interpreter(), "-m", "lmcache.v1.server", "127.0.0.1", str(port)], _ENVIRONMENT)
        self.wait_until(lambda: can_connect(port), seconds=90)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self.on_close(self._socket.close)
        self._reader = self._socket.makefile("rb", buffering=65536)
        self.on_close(self._reader.close)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _header(self, command: int, key: bytes, length: int) -> bytes:
        name = f"kvtier@1@0@{key.hex()}@uint8".encode().ljust(150)
        return self._request.pack(command, length, self._format, self._uint8, 0, length, 0, 0, 0, name)

    def _answer(self) -> tuple[int, ...]:
        return self._reply.unpack(self._reader.read(self._reply.size))[:2]

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._socket.sendall(self._header(self._put, key, block.nbytes))
            self._socket.sendall(block)
        # A PUT has no answer: requests are served in order, so this one comes after all are stored.
        self._socket.sendall(self._header(self._exist, keys[-1], 0))
        if self._answer()[0] != self._success:
            raise PeerError("LMCache's server did not store a block.")

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        sent = 0
        for index, target in enumerate(into):
            ahead = keys[sent : index + self._ahead]
            self._socket.sendall(b"".join(self._header(self._get, key, 0) for key in ahead))
            sent += len(ahead)
            if self._answer() != (self._success, target.nbytes):
                raise PeerError("LMCache's server does not have a block it was given.")
            self._reader.readinto(target)  # drains what it holds, then receives straight into the target


class LMCacheDaemon(ChildServerPeer):
    """Prepare and commit against LMCache's multiprocess server in its engine-driven shm mode.

    The daemon names blocks by the tokens of a whole prompt, so each set() call is one prompt with one
    chunk per block, and get() asks for leading parts of such prompts: keys must come in set()'s order.
    """

    name = "lmcache daemon"
    transport = "shm"
    _socket: Any
    _pool: memoryview
    _calls: int
    _prompts: dict[bytes, tuple[int, list[bytes]]]  # by first key: the prompt's number and all its keys

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        zmq: Any = importlib.import_module("zmq")
        port = free_port()
        gigabytes = (2 * block_bytes * num_blocks + (256 << 20)) / (1 << 30)
        options = {
            "--host": "127.0.0.1", "--port": str(port), "--chunk-size": str(_CHUNK),
            "--supported-transfer-mode": "engine_driven", "--shm-name": f"kvtier_{os.getpid()}_{port}",
            "--l1-size-gb": f"{gigabytes:.2f}", "--eviction-policy": "LRU",
        }  # fmt: skip
        command = [_interpreter(), "-m", "lmcache.v1.multiprocess.server", *chain(*options.items())]
        self.spawn([*command, "--no-l1-use-lazy", "--disable-observability"], _ENVIRONMENT)
        self.wait_until(lambda: can_connect(port), seconds=90)
        context = zmq.Context()
        self.on_close(lambda: context.destroy(linger=0))
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._calls, self._prompts = 0, {}
        layout = {
            "instance_id": os.getpid(), "model_name": "kvtier", "world_size": 1, "use_mla": True,
            "num_layers": 1, "hidden_dim_size": block_bytes, "dtype_str": "uint8", "num_physical_slots": 1,
        }  # fmt: skip
        name = self._call("register", {**layout, "block_size": _CHUNK})["shm_name"].lstrip("/")
        if not name:
            raise PeerUnavailable("LMCache's daemon did not offer shared memory.")
        segment = Path("/dev/shm", name)
        self.on_close(lambda: segment.unlink(missing_ok=True))
        with segment.open("r+b") as file:
            self._pool = memoryview(mmap.mmap(file.fileno(), 0))
        self.on_close(lambda: delattr(self, "_pool"))

    def _call(self, operation: str, *payloads: Any) -> Any:
        self._calls += 1
        parts = (self._calls, _OPERATIONS[operation], *payloads)
        self._socket.send_multipart([msgspec.msgpack.encode(part) for part in parts])
        if not self._socket.poll(_TIMEOUT_S * 1000):
            raise PeerError(f"LMCache's daemon did not answer {operation}.")
        answer = self._socket.recv_multipart()
        if msgspec.msgpack.decode(answer[0]) != self._calls:
            raise PeerError(f"LMCache's daemon answered another call than {operation}.")
        return msgspec.msgpack.decode(answer[2]) if len(answer) > 2 else None

    def _range(self, prompt: int, blocks: int) -> dict[str, Any]:
        tokens = [prompt, *range(1, blocks * _CHUNK)]
        return {
            "model_name": "kvtier", "world_size": 1, "worker_id": 0, "num_kv_readers": 1,
            "request_id": f"call-{self._calls}", "token_ids": tokens, "start": 0, "end": len(tokens),
        }  # fmt: skip

    def _slots(self, answer: dict[str, Any], expected: int) -> list[memoryview]:
        slots = answer["context"].get("slots") or []
        if len(slots) != expected:
            raise PeerError(f"LMCache's daemon offered {len(slots)} of {expected} blocks.")
        return [self._pool[slot["offset"] : slot["offset"] + slot["length"]] for slot in slots]

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        self.drop([key for key in keys if key in self._prompts])
        prompt = self._calls  # never used before: a stored prompt would not be written again
        request = self._range(prompt, len(keys))
        slots = self._slots(self._call("prepare_store", request, os.getpid()), len(keys))
        for slot, block in zip(slots, blocks, strict=True):
            slot[:] = block
        if not self._call("commit_store", request, os.getpid(), b""):
            raise PeerError("LMCache's daemon did not commit the blocks.")
        self._call("end_session", request["request_id"])
        self._prompts[keys[0]] = (prompt, list(keys))

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        start = 0
        while start < len(keys):
            prompt, stored = self._prompts.get(keys[start], (0, []))
            sizes = range(len(stored), 0, -1)
            count = next((n for n in sizes if stored[:n] == keys[start : start + n]), 0)
            if not count:
                raise PeerError("LMCache's daemon finds prefixes only: get keys in the order of set().")
            request = self._range(prompt, count)
            self._call("lookup", {**request, "worker_id": None}, 1)
            self._call("wait_prefetch_status", request["request_id"], _TIMEOUT_S)
            slots = self._slots(self._call("prepare_retrieve", request, os.getpid()), count)
            for slot, target in zip(slots, into[start : start + count], strict=True):
                target[:] = slot
            self._call("commit_retrieve", request, os.getpid())
            self._call("end_session", request["request_id"])
            start += count

    def drop(self, keys: list[bytes]) -> None:
        """The daemon can only forget everything: done once every stored prompt is to be dropped."""
        dropped = [self._prompts.pop(key) for key in keys if key in self._prompts]
        if dropped and not self._prompts:
            self._call("clear", True)


def peers() -> list[Peer]:
    """The plain server and the daemon."""
    return [LMCacheServer(), LMCacheDaemon()]
