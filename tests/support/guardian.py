"""Nothing outlives a run of the tests: what still runs at its end is named, fails it and is ended, however it ended.

`python -m tests.support.guardian PID MARK` waits for the end of process PID. Then it ends all processes with MARK in
their environment. pytest sets the mark, so that all processes under it inherit it. Those of other runs have another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

MARK = "KVTIER_TEST_RUN"
_ROUNDS = 10
_LOOK_S = 0.05
_OF_LIBRARIES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Processes that a library starts once for the process that uses it, and that end with it."""

_STARTING_LOOKS = 40
_SHOWN_CHARACTERS = 200
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


def is_guarded_here() -> bool:
    """Whether the run began with this process, and not above it."""
    return _guardian is not None


def end_leftovers(patience_s: float) -> list[str]:
    """Processes of this run that have not ended by themselves within `patience_s`, as `pid: command`. They are killed.

    Those that this process runs under are none, and those that libraries keep for it.
    """
    mark = os.environ[MARK]
    deadline = time.monotonic() + patience_s
    while (left := _leftovers(mark)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    _kill(left)
    return [f"{pid}: {command}" for pid, command in left.items()]


def _leftovers(mark: str) -> dict[int, str]:
    own = {os.getpid(), *_ancestors(os.getpid())}
    found = {pid: _command(pid) for pid in _marked(mark) if pid not in own}
    return {pid: command for pid, command in found.items() if command and not any(map(command.count, _OF_LIBRARIES))}


def _command(pid: int) -> str:
    """Empty for a process that has ended, even if it was not reaped."""
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace")[:_SHOWN_CHARACTERS]


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        pid = int(fields[1])
        yield pid


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in _environment(Path("/proc", entry)).split(b"\0"):
                    found.append(int(entry))
    return found


def _environment(process: Path) -> bytes:
    """A process that has just replaced its program has none for a moment: it is looked at again."""
    for _ in range(_STARTING_LOOKS):
        if environment := (process / "environ").read_bytes():
            return environment
        os.readlink(process / "exe")  # fails for a process that has ended and for a thread of the kernel
        time.sleep(_LOOK_S)
    return b""


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
        _kill(pids)


if __name__ == "__main__":
    main()
