"""Engine processes for the tests of this folder: a nursery has everything loaded and forks engines on demand.

`python -m tests.support.engine_actors SOCKET` reads orders in lines of JSON. A child that it forks opens an engine,
says so over a connection to SOCKET, computes when it reads a line, and may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvtier import SamplingParams
from kvtier.testing.signals import send_signal
from kvtier.transfer import storer
from tests.support.actors import ROOT
from tests.support.tiered_engines import open_engine, tokens
from tests.support.waiting import LIMIT_S


class Child:
    """An engine process: it says one line when it is ready, and one for every prompt that it has answered."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self._sock = sock
        self._file = sock.makefile("rw")

    def go_on(self) -> None:
        self._file.write("\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        self._sock.settimeout(LIMIT_S)
        line = self._file.readline()
        assert line, "the engine ended without a word"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def send_signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._file.close()
        self._sock.close()


class Nursery:
    """Where children come from. Its own end is theirs."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = str(folder / "nursery.sock")
        self._listener.bind(self._path)
        self._listener.listen()
        self._listener.settimeout(LIMIT_S)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_actors", self._path],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            text=True,
        )
        self._children: list[Child] = []

    def engine(self, model: Path, seeds: list[int], num_tokens: int, **settings: object) -> Child:
        """An engine that will answer the prompts of `seeds` one after the other. It is not ready yet: hear it."""
        assert self._process.stdin is not None
        order = {"model": str(model), "seeds": seeds, "num_tokens": num_tokens, "settings": settings}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        sock, _ = self._listener.accept()
        pid = int(sock.recv(16).decode())
        child = Child(pid, sock)
        self._children.append(child)
        return child

    def end_children(self) -> None:
        while self._children:
            self._children.pop().close()

    def close(self) -> None:
        self.end_children()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._listener.close()


@contextlib.contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    opened = Nursery(folder)
    try:
        yield opened
    finally:
        opened.close()


def _run(path: str) -> None:
    """Fork a child for each line; reap those that are over."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            sys.stdin.close()
            _grow_up(path, json.loads(line))
            os._exit(0)


def _grow_up(path: str, order: dict[str, Any]) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    sock.send(str(os.getpid()).encode().ljust(16))
    file = sock.makefile("rw")

    def say(**answer: object) -> None:
        file.write(json.dumps(answer) + "\n")
        file.flush()

    storer._BATCH_S = 0.0  # blocks go as they come: a kill should find a prompt half stored
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with open_engine(Path(order["model"]), **order["settings"]) as llm:
        say(ready=True)
        file.readline()
        for seed in order["seeds"]:
            [output] = llm.generate(tokens(seed, order["num_tokens"]), params, progress=False)
            completion = output.outputs[0]
            say(tokens=completion.token_ids, cached=completion.cached_tokens, ttft_s=completion.ttft_s)
        traffic = llm.engine.transfer.traffic
        assert traffic is not None
        say(settled=traffic.settle(LIMIT_S), num_threads=threading.active_count())
        file.readline()


if __name__ == "__main__":
    _run(sys.argv[1])
