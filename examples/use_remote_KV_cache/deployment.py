"""`kvtier serve` in a process of its own, for programs that start, restart and stop it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import urlsplit

from examples.use_remote_KV_cache.asking import DEFAULT_URL, ready_since

_LOOK_S = 0.05
_CONNECT_S = 5.0
_READY_S = 600.0
_STOP_S = 120.0


class Deployment:
    """Ready when entered; stopped, with everything it started, when left. Its log goes to `log`."""

    def __init__(
        self, file: Path, *, url: str = DEFAULT_URL, log: IO[str] | None = None, ready_s: float = _READY_S
    ) -> None:
        self._file = file
        self._url = url
        self._log = log
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Raises `RuntimeError` if it cannot start, with the reason in its log; `TimeoutError` if it is never ready."""
        if _is_answered(self._url):
            raise RuntimeError(f"another program already answers at {self._url}: stop it, or use another port")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvtier", "serve", str(self._file)],
            stdout=self._log,
            stderr=self._log,
            preexec_fn=_heed_hangups,
        )
        self._wait(after=0.0)

    def restart_engines(self) -> None:
        """The engines alone: the cache server stays."""
        assert self._process is not None
        asked_at = time.time()
        self._process.send_signal(signal.SIGHUP)
        self._wait(after=asked_at)

    def restart_everything(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _wait(self, *, after: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._ready_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"kvtier serve {self._file} ended with status {self._process.returncode}")
            since = ready_since(self._url)
            if since and min(since.values()) > after:
                return
            time.sleep(_LOOK_S)
        raise TimeoutError(
            f"{self._url} is not ready after {self._ready_s:g} s: is that where {self._file} serves the OpenAI API?"
        )


def _heed_hangups() -> None:
    """In the new process: SIGHUP restarts its engines, even under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _is_answered(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port or 80), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True
