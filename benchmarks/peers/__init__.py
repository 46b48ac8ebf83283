"""Competing systems behind one small interface, to be measured next to kvtier's cache server.

Every peer starts its own server (another process, except ZeroMQ's inproc thread) on 127.0.0.1 or on a
Unix socket in a temporary directory, stores blocks in it and reads them back into the caller's buffers.
Packages are imported only in open(): a peer that is not installed is still listed and says so there.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

__all__ = [
    "ChildServerPeer",
    "Peer",
    "PeerError",
    "PeerUnavailable",
    "address_of",
    "all_peers",
    "can_connect",
    "free_port",
]

_MODULES = ("zeromq", "redis_server", "mooncake", "vineyard_blobs", "lmcache_server")
_REPOSITORY = Path(__file__).resolve().parents[2]
_children: set[subprocess.Popen[bytes]] = set()


class PeerUnavailable(Exception):
    """The peer is not installed or cannot run here; the message is one sentence for the table."""


class PeerError(RuntimeError):
    """A peer that did start failed to store or return a block."""


@runtime_checkable
class Peer(Protocol):
    """A peer, as benchmarks use it. set() on a stored key replaces its block."""

    name: str
    transport: str

    def open(self, block_bytes: int, num_blocks: int) -> None:
        """Start the server, with room for num_blocks blocks, and connect. Raises PeerUnavailable."""

    def set(self, keys: list[bytes], blocks: list[memoryview]) -> None:
        """Store the blocks; all of them are stored when this returns."""

    def get(self, keys: list[bytes], into: list[memoryview]) -> None:
        """Read the blocks; all bytes are in the caller's buffers when this returns."""

    def drop(self, keys: list[bytes]) -> None:
        """Forget the keys where the peer can: called between rounds, not to be timed."""

    def close(self) -> None:
        """End the peer's processes and remove its files. May be called twice, and after a failed open()."""


def _end(child: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """End one child by its pid: ask, wait, then insist."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    _children.discard(child)


@atexit.register
def _end_all() -> None:
    for child in list(_children):
        _end(child, grace_s=2.0)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ChildServerPeer:
    """Base of the adapters: a temporary directory, child processes, and cleaning up after both."""

    name: str = ""
    transport: str = ""

    def __init__(self) -> None:
        self._spawned: list[subprocess.Popen[bytes]] = []
        self._directory: Path | None = None
        self._closing = contextlib.ExitStack()

    def open(self, block_bytes: int, num_blocks: int) -> None:
        try:
            self._start(block_bytes, num_blocks)
        except ImportError as error:
            self.close()
            raise PeerUnavailable(f"{self.name} cannot be imported here ({error}).") from error
        except BaseException:
            self.close()
            raise

    def drop(self, keys: list[bytes]) -> None:
        """Most peers replace a block in place; those that need a deletion first override this."""

    def close(self) -> None:
        try:
            self._closing.close()
        finally:
            while self._spawned:
                _end(self._spawned.pop())
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None

    def _start(self, block_bytes: int, num_blocks: int) -> None:
        raise NotImplementedError

    def on_close(self, action: Callable[[], object]) -> None:
        """Have close() do this before it ends the processes; the last one given is done first."""
        self._closing.callback(action)

    def directory(self) -> Path:
        """A temporary directory of this peer's own, for sockets and logs."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="kvtier-peer-"))
        return self._directory

    def spawn(self, command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start one server process; its output goes to a log in directory()."""
        path = os.pathsep.join(part for part in (str(_REPOSITORY), os.environ.get("PYTHONPATH")) if part)
        with open(self.directory() / f"{len(self._spawned)}.log", "wb") as log:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory(),
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
            )
        _children.add(child)
        self._spawned.append(child)
        return child

    def spawn_module(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a module of this package as a server process, under this interpreter."""
        return self.spawn([sys.executable, "-m", module, *arguments])

    def wait_until(self, ready: Callable[[], object], seconds: float = 30.0) -> None:
        """Poll ready() until it is true; PeerUnavailable when a child ends first or time runs out."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if ready():
                    return
            except (OSError, ValueError):
                pass
            if any(child.poll() is not None for child in self._spawned):
                raise PeerUnavailable(f"{self.name}'s server ended while starting: {self._last_words()}")
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"{self.name}'s server was not ready in {seconds:.0f} s.")
            time.sleep(0.05)

    def log_contains(self, text: bytes) -> bool:
        """Whether the log of the process spawned last has this text yet."""
        return text in (self.directory() / f"{len(self._spawned) - 1}.log").read_bytes()

    def _last_words(self) -> str:
        lines: list[str] = []
        for log in sorted(self.directory().glob("*.log")):
            lines += [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing."


def can_connect(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True


def address_of(block: memoryview) -> int:
    """Where the block's bytes begin, for peers that take pointers."""
    import numpy as np

    return int(np.frombuffer(block, np.uint8).ctypes.data)


def all_peers() -> list[Peer]:
    """Every peer, installed or not, in the order of the table."""
    peers: list[Peer] = []
    for module in _MODULES:
        peers += importlib.import_module(f"{__name__}.{module}").peers()
    return peers
