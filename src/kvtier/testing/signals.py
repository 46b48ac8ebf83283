"""Signals to processes of a test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_STOPPED_S = 120.0
_LOOK_S = 0.002
_AT_REST = frozenset("TtZX")
"""States of threads that are stopped, traced or have ended."""


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal. After SIGSTOP, return once all threads of the process have stopped.

    SIGSTOP wakes one thread, which stops the others: on a busy machine, they may still answer requests until it runs.
    """
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return
    deadline = time.monotonic() + _STOPPED_S
    while not is_stopped(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} has not stopped within {_STOPPED_S:g} s")
        time.sleep(_LOOK_S)


def is_stopped(pid: int) -> bool:
    """Whether no thread of the process runs: it is stopped or has ended."""
    try:
        threads = list(Path("/proc", str(pid), "task").iterdir())
    except FileNotFoundError:
        return True
    return all(_state(thread) in _AT_REST for thread in threads)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
