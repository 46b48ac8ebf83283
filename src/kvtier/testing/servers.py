"""Starts, awaits and stops real cache server processes, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.testing.signals import send_signal

_STOP_S = 120.0
_ADDRESS = re.compile(r"^  (?:metrics: )?(unix|tcp|http):(\S+)")


@dataclass
class ServerProcess:
    """A running `kvtier cache-server`. `unix`, `tcp` and `metrics` are its addresses; `token` is for TCP."""

    process: subprocess.Popen[str]
    folder: Path
    token: str
    addresses: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def unix(self) -> str:
        return self.addresses["unix"]

    @property
    def tcp(self) -> str:
        return self.addresses["tcp"]

    @property
    def metrics(self) -> str:
        return self.addresses["http"]

    def send_signal(self, number: signal.Signals) -> None:
        """SIGSTOP has stopped all threads of the server when this returns."""
        if self.process.poll() is None:
            send_signal(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ask the server to stop, and wait for it. Returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def cache_server(
    *options: str, memory: str = "64MiB", tcp: bool = False, folder: Path | None = None, port: int = 0
) -> Iterator[ServerProcess]:
    """A server in its own process, in a temporary folder unless one is given."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-")))
        server = start_cache_server(folder, *options, memory=memory, tcp=tcp, port=port)
        try:
            yield server
        finally:
            server.stop()
            assert server.process.stdout is not None
            server.process.stdout.close()


def start_cache_server(folder: Path, *options: str, memory: str, tcp: bool, port: int = 0) -> ServerProcess:
    """Start a server and wait until it is ready; the caller stops it."""
    token = "a token for tests"
    arguments: Sequence[str] = ["--memory", memory, "--socket", str(folder / "kvtier.sock"), *options]
    if tcp:
        (folder / "token").write_text(token)
        arguments = [*arguments, "--tcp", f"127.0.0.1:{port}", "--token-file", str(folder / "token")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvtier", "cache-server", *arguments], stdout=subprocess.PIPE, text=True
    )
    server = ServerProcess(process, folder, token)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = _ADDRESS.match(line)
            if found:
                server.addresses[found[1]] = f"{found[1]}:{found[2]}"
            if line.startswith("ready"):
                return server
        raise RuntimeError(f"the cache server ended with status {process.wait()} before it was ready")
    except BaseException:
        server.kill()
        process.stdout.close()
        raise
