"""Engines that pretend to be vLLM's, each a process with an HTTP server on a Unix socket (`fake_vllm`)."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.api.config import ApiConfig, ApiKey, EngineAddress, ServedModelConfig
from kvtier.testing.signals import send_signal
from tests.support.waiting import LIMIT_S, wait_until

PACKAGE = Path(__file__).with_name("fake_vllm")
"""To be put on PYTHONPATH: in it, vLLM is the one that pretends."""

MODEL = "fake"
_SERVER = PACKAGE / "vllm" / "entrypoints" / "openai" / "api_server.py"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as an engine got it. `ended` is "answered", "aborted", or empty while it is under way."""

    target: str
    headers: Mapping[str, str]
    body: bytes
    ended: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class FakeVllm:
    """Runs from `start` to `stop` or `kill`, which may alternate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.name, str(self.path))

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns once it answers, or has ended at a request that was waiting for an engine."""
        self.stop()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SERVER), "--uds", str(self.path), "--served-model-name", MODEL],
            stdout=subprocess.DEVNULL,
        )
        wait_until(lambda: not self.is_running or _get(self.path, "/health") is not None, "a fake vLLM")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        assert self._process is not None
        send_signal(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def asked(self) -> list[Asked]:
        """All that it was asked, in order."""
        found = json.loads(_get(self.path, "/fake/requests") or b"[]")
        return [
            Asked(one["target"], dict(one["headers"]), base64.b64decode(one["body"]), one["ended"]) for one in found
        ]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(LIMIT_S)


@contextlib.contextmanager
def fake_vllms(folder: Path, count: int = 1) -> Iterator[list[FakeVllm]]:
    """`folder` is best a short one: a Unix socket's path has 107 bytes."""
    engines: list[FakeVllm] = []
    try:
        for number in range(count):
            engines.append(FakeVllm(folder / f"vllm-{number}.sock"))
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def config_of_vllm(
    *engines: FakeVllm,
    keys: tuple[ApiKey, ...] = (),
    others: tuple[ServedModelConfig, ...] = (),
    max_body_bytes: int = 8 << 20,
    max_requests: int = 64,
) -> ApiConfig:
    """The model `MODEL` on all these engines, and others."""
    model = ServedModelConfig(names=(MODEL,), engines=tuple(one.address for one in engines), is_vllm=True)
    return ApiConfig(
        models=(model, *others), keys=keys, max_body_bytes=max_body_bytes, max_requests=max_requests, drain_s=1.0
    )


def chat(text: str, *before: str, **fields: Any) -> dict[str, Any]:
    """A body of a chat: `before` are the messages before the last one, the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": one} for number, one in enumerate((*before, text))]
    return {"model": MODEL, "messages": messages, **fields}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def _get(path: Path, page: str) -> bytes | None:
    with contextlib.closing(_UnixConnection(path)) as connection:
        try:
            connection.request("GET", page)
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return None
