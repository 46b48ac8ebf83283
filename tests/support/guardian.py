"""Nothing outlives a run of the tests: what still runs when pytest has ended, however it ended, is killed.

`python -m tests.support.guardian PID MARK` waits for the end of process PID. Then it ends all processes with MARK in
their environment. pytest sets the mark, so that all processes under it inherit it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
from pathlib import Path

MARK = "KVTIER_TEST_RUN"
_ROUNDS = 10
_guardian: subprocess.Popen[bytes] | None = None


def guard_this_process() -> None:
    """Start a guardian, unless this process is under one."""
    if MARK in os.environ:
        return
    mark = secrets.token_hex(8)
    global _guardian  # a child that is still running is not to be collected
    _guardian = subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[MARK] = mark


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def main() -> None:
    pid, mark = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    for _ in range(_ROUNDS):  # a process may fork while it is looked for
        pids = _marked(mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
