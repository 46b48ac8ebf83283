"""One part of a deployment in its own process.

    python -m kvtier.deploy.run.part KIND NAME RUNTIME_FOLDER REPORT_FD [LISTENER_FD ...]

Its settings come as one line on stdin. That pipe stays open as long as the supervisor lives: when it closes, the part
ends by itself, so nothing keeps running after a supervisor was killed. SIGTERM ends it cleanly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.cacheserver.server import CacheServer
from kvtier.deploy.plan.parts import CachePart, EnginePart, HttpPart, VllmPart, decode_part
from kvtier.deploy.run.reports import Failed, Ready, Reporter
from kvtier.deploy.run.served_caches import remove_runtime_folder
from kvtier.deploy.run.vllm_part import run_vllm
from kvtier.errors import KvtierError
from kvtier.observe.recent_warnings import RecentWarnings

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SUPERVISOR = os.getppid()
_ORPHAN_S = 60.0
"""Time for a part whose supervisor is gone to end cleanly."""


def main(arguments: list[str]) -> int:
    kind, _, runtime_folder, report_fd, *listener_fds = arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    warnings = RecentWarnings()
    logging.getLogger().addHandler(warnings)
    reporter = Reporter(int(report_fd))
    settings = sys.stdin.buffer.readline()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # before any thread starts: only the waiting thread sees them
    threading.Thread(target=_watch_supervisor, name="kvtier-supervisor-watch", daemon=True).start()
    try:
        _RUNS[kind](settings, reporter, warnings, [int(fd) for fd in listener_fds])
    except KvtierError as error:
        reporter.tell(Failed(str(error)))
        return 1
    except ImportError as error:
        reporter.tell(Failed(_missing(kind, error)))
        return 1
    finally:
        _leave(runtime_folder)
    return 0


def _run_cache(settings: bytes, reporter: Reporter, warnings: RecentWarnings, fds: list[int]) -> None:
    part = decode_part(settings, CachePart)
    server = CacheServer(part.server, warnings=warnings)
    reporter.tell(Ready({"tcp_port": server.tcp_port, "metrics_port": server.metrics_port}))
    signal.sigwait(_SIGNALS)
    logger.info("stopping")
    server.close()


def _run_engine(settings: bytes, reporter: Reporter, warnings: RecentWarnings, fds: list[int]) -> None:
    # Not imported above: it imports torch, which no other part needs.
    from kvtier.deploy.run.engine_part import run_engine  # noqa: PLC0415

    part = decode_part(settings, EnginePart)
    run_engine(part, reporter, _SIGNALS, warnings)


def _run_vllm(settings: bytes, reporter: Reporter, warnings: RecentWarnings, fds: list[int]) -> None:
    run_vllm(decode_part(settings, VllmPart), reporter, _SIGNALS)


def _run_http(settings: bytes, reporter: Reporter, warnings: RecentWarnings, fds: list[int]) -> None:
    from kvtier.api.server import serve_http  # noqa: PLC0415 - only this part needs the HTTP libraries

    part = decode_part(settings, HttpPart)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # its event loop has handlers for them
    listeners = [(one.api, socket.socket(fileno=fd)) for one, fd in zip(part.listeners, fds, strict=True)]
    serve_http(part.api, listeners, lambda: reporter.tell(Ready({})), warnings)


_RUNS: dict[str, Callable[[bytes, Reporter, RecentWarnings, list[int]], None]] = {
    "cache": _run_cache,
    "engine": _run_engine,
    "vllm": _run_vllm,
    "http": _run_http,
}


def _watch_supervisor() -> None:
    """Wait for the pipe's end: nothing else comes after the settings."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_S)
    os._exit(1)


def _leave(runtime_folder: str) -> None:
    """The last part to leave removes the folder, if the supervisor no longer can."""
    if os.getppid() != _SUPERVISOR:
        remove_runtime_folder(Path(runtime_folder))


def _missing(kind: str, error: ImportError) -> str:
    extra = {"engine": "engine", "http": "server"}.get(kind)
    hint = f": pip install 'kvtier[{extra}]'" if extra else ""
    return f"the part {kind} needs {error.name or error}{hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
