"""`kvtier serve` in a process of its own, for programs that start, restart and stop it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from examples.use_remote_KV_cache.asking import DEFAULT_URL, ready_since

_LOOK_S = 0.05
_STOP_S = 120.0


class Deployment:
    """Ready when entered; stopped, with everything it started, when left. Its log goes to `log`."""

    def __init__(self, file: Path, *, url: str = DEFAULT_URL, log: IO[str] | None = None) -> None:
        self._file = file
        self._url = url
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Raises `RuntimeError` when it cannot start; why is in its log."""
        output = self._log if self._log is not None else None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", "serve", str(self._file)], stdout=output, stderr=output
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
        while True:
            since = ready_since(self._url)
            if since and min(since.values()) > after:
                return
            if self._process.poll() is not None:
                raise RuntimeError(f"kvtier serve ended with status {self._process.returncode}")
            time.sleep(_LOOK_S)
