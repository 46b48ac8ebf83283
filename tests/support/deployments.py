"""Real deployments for tests and benchmarks: `kvtier serve` in a process of its own, started, waited for, ended.

Every process that descends from one carries a mark in its environment, so that what outlives its supervisor is found.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from kvtier.testing.signals import send_signal
from tests.support.waiting import LIMIT_S

_MARK = "KVTIER_TEST_DEPLOYMENT"
_PART = "kvtier.deploy.run.part"
_LOOK_S = 0.02
_READY_S = LIMIT_S
_STOP_S = LIMIT_S
_REQUEST_S = 30.0
_LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class PartProcess:
    """A cache server, an engine or the HTTP server of a deployment; `kind` is "cache", "engine", "vllm" or "http"."""

    kind: str
    name: str
    pid: int

    def send_signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)


class DeploymentProcess:
    """`kvtier serve` over the file `deploy.yml` of `folder`. Entered, it is ready; left, all of it is gone.

    `text` is the file without its `http` section, whose settings are `http`; the ports are found here, and stay the
    same when it is started again. `environment` is added to this process's. Its log is the file `log`, which grows over
    restarts.
    """

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        http: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._environment = environment or {}
        self.openai_port, self.ollama_port = free_ports(2)
        self.runtime_parent = Path(tempfile.mkdtemp(prefix="kv-"))  # short: a socket's path has 107 bytes
        self.file = folder / "deploy.yml"
        ports = {"openai": self.openai_port, "ollama": self.ollama_port}
        folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(f"{text}\n{yaml.safe_dump({'http': {**ports, **(http or {})}})}")
        self._log_file = folder / "log"
        self._log_file.write_bytes(b"")
        self._mark = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_before = 0

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def openai_url(self) -> str:
        """Without the `/v1` that OpenAI's clients want behind it."""
        return f"http://127.0.0.1:{self.openai_port}"

    @property
    def ollama_url(self) -> str:
        return f"http://127.0.0.1:{self.ollama_port}"

    @property
    def pid(self) -> int:
        """The supervisor's."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def user_environment(self) -> dict[str, str]:
        """The environment of a command that finds this deployment, and no other that runs on this machine."""
        folder = str(self.runtime_parent)
        return {**os.environ, "XDG_RUNTIME_DIR": folder, "TMPDIR": folder}

    # --- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, without waiting until it is ready. An earlier start must have ended."""
        assert not self.is_running
        self._log_before = len(self.log())
        environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.runtime_parent),
            "OMP_NUM_THREADS": "1",  # tiny models gain nothing from more, and tests share few cores
            **self._environment,
            _MARK: self._mark,
        }
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtier", "serve", str(self.file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_until_ready(self, *, after: float = 0.0, timeout_s: float = _READY_S) -> None:
        """Wait until each engine was ready after `after` (seconds of the epoch) and the supervisor knows it.

        A part that dies before that counts as one that cannot start.

        Raises `RuntimeError` when it ends meanwhile, and `TimeoutError`, both with the end of its log.
        """

        def is_ready() -> bool:
            if not self.is_running:
                raise RuntimeError(f"kvtier serve has ended:\n{self._end_of_log()}")
            is_known = "\nready after " in self.log()[self._log_before :]
            return is_known and self._is_ready() and min(self.ready_since().values(), default=0.0) > after

        self._wait(is_ready, timeout_s, "it is not ready")

    def wait_until_ended(self, timeout_s: float = _STOP_S) -> int:
        """The supervisor's exit status. Raises `TimeoutError`."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"kvtier serve runs on after {timeout_s:g} s:\n{self._end_of_log()}") from error

    def send_signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> int:
        """In good order. Returns the exit status."""
        self.send_signal(signal.SIGTERM)
        return self.wait_until_ended()

    def kill(self) -> None:
        """The supervisor alone: its parts are to end by themselves."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart_engines(self) -> None:
        """One by one, and wait until all of them are new. One that the supervisor is starting is not started again."""
        asked_at = time.time()
        self.send_signal(signal.SIGHUP)
        self.wait_until_ready(after=asked_at)

    def close(self) -> None:
        """Whatever state it is in: no process and no file of it is left, but its folder."""
        with contextlib.suppress(TimeoutError):
            if self.is_running:
                self.stop()
        if self.is_running:
            self.kill()
        for pid in self.process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for place, folders, files in os.walk(self.runtime_parent, topdown=False):
            for name in files:
                os.unlink(os.path.join(place, name))
            for name in folders:
                os.rmdir(os.path.join(place, name))
        with contextlib.suppress(FileNotFoundError):
            self.runtime_parent.rmdir()

    # --- what is seen of it -------------------------------------------------------------------------------------------

    def ready_since(self) -> dict[str, float]:
        """The start times of the running engines, in seconds of the epoch."""
        try:
            _, document = self.get("/ready")
        except (OSError, http.client.HTTPException):
            return {}
        states = [state for engines in document["models"].values() for state in engines.items()]
        return {name: state["since"] for name, state in states if state["status"] == "ready"}

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON document of a page of the OpenAI server. Raises `OSError` if nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.openai_port, timeout=_REQUEST_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def log(self) -> str:
        """All that it has said."""
        return self._log_file.read_text(errors="replace")

    def wait_for_log(self, pattern: str, *, after: int = 0, timeout_s: float = _READY_S) -> re.Match[str]:
        """Wait until `pattern` is in the log behind its first `after` characters. Raises `TimeoutError`."""
        found: list[re.Match[str]] = []

        def is_there() -> bool:
            match = re.search(pattern, self.log()[after:], re.MULTILINE)
            if match is not None:
                found.append(match)
            return bool(found)

        self._wait(is_there, timeout_s, f"nothing in its log matches {pattern!r}")
        return found[0]

    def parts(self) -> dict[str, PartProcess]:
        """The running parts, by name."""
        found = {}
        for pid in self.process_ids():
            with contextlib.suppress(OSError, ValueError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                kind, name = words[words.index(_PART) + 1 :][:2]
                found[name] = PartProcess(kind, name, pid)
        return found

    def part(self, name: str) -> PartProcess:
        """Raises `KeyError` when it does not run."""
        return self.parts()[name]

    def wait_for_part(self, name: str, *, other_than: int = 0, timeout_s: float = _READY_S) -> PartProcess:
        """Wait until it runs in a process other than `other_than`. Raises `TimeoutError`."""

        def is_there() -> bool:
            return name in (parts := self.parts()) and parts[name].pid != other_than

        self._wait(is_there, timeout_s, f"there is no part {name}")
        return self.part(name)

    def process_ids(self) -> set[int]:
        """All processes that it started, including orphans."""
        mark = f"{_MARK}={self._mark}".encode()
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
        return found

    def left_behind(self) -> list[str]:
        """Remains that should be gone once it has ended: processes, files, ports."""
        left = [f"process {pid}" for pid in sorted(self.process_ids())]
        left += [str(path) for path in sorted(self.runtime_parent.rglob("*"))]
        for port in (self.openai_port, self.ollama_port):
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                left.append(f"port {port}")
        return left

    def wait_until_nothing_is_left(self, timeout_s: float = _STOP_S) -> None:
        """For one whose supervisor was killed. Raises `TimeoutError` with what is still there."""
        with contextlib.suppress(TimeoutError):
            self._wait(lambda: not self.left_behind(), timeout_s, "")
        if left := self.left_behind():
            raise TimeoutError(f"left behind after {timeout_s:g} s: {', '.join(left)}")

    def _is_ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _wait(self, is_so: Callable[[], bool], timeout_s: float, sentence: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{sentence} after {timeout_s:g} s:\n{self._end_of_log()}")
            time.sleep(_LOOK_S)

    def _end_of_log(self) -> str:
        return "\n".join(self.log().splitlines()[-_LOG_LINES:])


@contextlib.contextmanager
def starting_deployment(
    folder: Path,
    text: str,
    *,
    http: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[DeploymentProcess]:
    """One that was started, and is not waited for."""
    deployment = DeploymentProcess(folder, text, http=http, environment=environment)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.close()


def free_ports(count: int) -> list[int]:
    """Free ports of loopback, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]
