"""Mooncake for tests: a stand-in for its master and its library that can be told to fail, and the real ones.

The stand-in is not Mooncake: it is a dictionary in this process behind a socket, and a package named `mooncake` that
asks it. What the real one does was measured with 0.3.13.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from kvtier.stores.mooncake.config import MooncakeConfig
from tests.support.waiting import CALL_S, LIMIT_S

Fault = Literal["hang", "fail", "lie", "short", "long", "full", "few", "crash"]

PACKAGE = Path(__file__).with_name("fake_mooncake")
_LENGTH_BYTES = 4
_MAX_BODY = 256 << 20
_NO_SPACE, _NOT_FOUND, _NO_ANSWER = -200, -704, -900


class StandInMaster:
    """`objects` are its bytes by key. `faults` are what it does wrong from now on, by act.

    `resume` lets the calls that hang go on; `calls` counts those that came.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, Fault] = {}
        self.calls: Counter[str] = Counter()
        self.setups: list[list[str]] = []
        self.resume = threading.Event()
        master = self

        class Handler(_Handler):
            served = master

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="mooncake-master")
        self._thread.start()

    def config(self, **more: Any) -> MooncakeConfig:
        port = self._server.server_address[1]
        settings = {"memory": 1 << 20, "buffer": 1 << 20, "timeout_s": CALL_S, "trusted_network": True, **more}
        return MooncakeConfig(master=f"127.0.0.1:{port}", **settings)

    def fail(self, fault: Fault | None, *acts: str) -> None:
        self.faults = {} if fault is None else dict.fromkeys(acts or ("exist", "get", "put", "remove"), fault)

    def close(self) -> None:
        """Behave like a killed process: nothing listens any more, and running calls end."""
        self.resume.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = True


class _Handler(socketserver.StreamRequestHandler):
    served: StandInMaster

    def handle(self) -> None:
        header = self.rfile.read(_LENGTH_BYTES)
        if len(header) < _LENGTH_BYTES:
            return  # somebody looked whether it is there
        length = int.from_bytes(header, "little")
        assert length <= _MAX_BODY
        asked = msgspec.msgpack.decode(self.rfile.read(length))
        body = msgspec.msgpack.encode(self._answer(asked["act"], asked["keys"], asked["payloads"]))
        with contextlib.suppress(OSError):
            self.wfile.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def _answer(self, act: str, keys: list[str], payloads: list[bytes]) -> dict[str, Any]:
        master = self.served
        master.calls[act] += 1
        fault = master.faults.get(act)
        if fault == "hang":
            master.resume.wait(LIMIT_S)
        if fault == "fail":
            return {"codes": [_NO_ANSWER] * len(keys), "payloads": []}
        if fault == "full":
            return {"codes": [_NO_SPACE] * len(keys), "payloads": []}
        if fault == "crash":
            return {"codes": [], "payloads": [], "crash": True}
        codes, found = self._done(act, keys, payloads)
        match fault:
            case "lie":
                found = [
                    payload[:100] + bytes([payload[100] ^ 1]) + payload[101:] if payload else b"" for payload in found
                ]
            case "short":
                found = [payload[: len(payload) // 2] for payload in found]
                codes = [len(payload) if code >= 0 else code for code, payload in zip(codes, found, strict=True)]
            case "long":
                found = [payload + b"more" for payload in found]
            case "few":
                codes, found = codes[:-1], found[:-1]
        return {"codes": codes, "payloads": found}

    def _done(self, act: str, keys: list[str], payloads: list[bytes]) -> tuple[list[int], list[bytes]]:
        objects = self.served.objects
        match act:
            case "setup":
                self.served.setups.append(keys)
            case "exist":
                return [int(key in objects) for key in keys], []
            case "put":
                for key, payload in zip(keys, payloads, strict=True):
                    objects.setdefault(key, payload)  # existing values are not overwritten
            case "get":
                found = [objects.get(key) for key in keys]
                codes = [_NOT_FOUND if payload is None else len(payload) for payload in found]
                return codes, [payload or b"" for payload in found]
            case "remove":
                return [0 if objects.pop(key, None) is not None else _NOT_FOUND for key in keys], []
            case "remove_all":
                gone = [key for key in list(objects) if re.search(keys[0], key)]
                return [sum(objects.pop(key, None) is not None for key in gone)], []
        return [0] * len(keys), []


@contextlib.contextmanager
def stand_in_master() -> Iterator[StandInMaster]:
    """With the stand-in's package in place of Mooncake's, for this process and those that it starts."""
    master = StandInMaster()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(PACKAGE)
            rest = os.environ.get("PYTHONPATH")
            patch.setenv("PYTHONPATH", str(PACKAGE) if not rest else f"{PACKAGE}{os.pathsep}{rest}")
            yield master
    finally:
        master.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
