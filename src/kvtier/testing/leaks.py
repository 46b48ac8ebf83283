"""A pytest plugin that fails tests that leave threads, descriptors, child processes, shared memory or blocked signals.

Only resources of this process count: files in `/dev/shm` only if it created them, or if it or a descendant has mapped
them. Off unless a project enables it with `kvtier_leaks = true` in its pytest settings.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 30.0
_LOOK_S, _MAX_LOOK_S = 0.02, 0.5
_CLOCK_TICK_S = 0.1
"""Linux counts the start of a process in hundredths of a second."""
_SHOWN_CHARACTERS = 200
_PROCESSORS = "/sys/devices/system/cpu/"
_SHARED_MEMORY = "/dev/shm/"
_SHM_PREFIXES = tuple(_SHARED_MEMORY + prefix for prefix in ("kvtier", "psm_", "sem.mp-"))

_created: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "kvtier_leaks",
        "fail tests that leave threads, descriptors, children, shared memory or blocked signals",
        "bool",
        False,
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getini("kvtier_leaks"):
        sys.addaudithook(_note_creation)


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getini("kvtier_leaks"):
        yield
        return
    before, began_at = held(), time.clock_gettime(time.CLOCK_BOOTTIME)
    yield
    left = {_described(one, began_at) for one in _left_since(before)} - {""}
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(left)), pytrace=False)


def held() -> set[str]:
    """The names of the resources that this process has now, and the signals that this thread blocks."""
    return {
        *(f"thread {thread.name} {thread.ident}" for thread in threading.enumerate() if _is_ours(thread)),
        *_descriptors(),
        *(f"child {pid}" for pid in _children(os.getpid())),
        *_shared_memory(),
        *(f"signal {number} blocked" for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def _described(name: str, began_at: float) -> str:
    """A child with its state and command; empty for one older than the test: Linux may leave some out of a list."""
    kind, _, pid = name.partition(" ")
    if kind != "child":
        return name
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""  # it has just ended
    state, started_at = fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if started_at < began_at - _CLOCK_TICK_S:
        return ""
    return f"{name} ({state}: {command.strip()[:_SHOWN_CHARACTERS]})"


def _note_creation(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and path.startswith(_SHM_PREFIXES) and isinstance(flags, int) and flags & os.O_CREAT:
            _created.add(path)


def _shared_memory() -> Iterator[str]:
    """Files in `/dev/shm` that this process created, and those that it or a descendant has mapped."""
    present = {path for name in os.listdir(_SHARED_MEMORY) if (path := _SHARED_MEMORY + name).startswith(_SHM_PREFIXES)}
    yield from present & _created
    if present:
        for pid in (os.getpid(), *_descendants(os.getpid())):
            try:
                maps = Path("/proc", str(pid), "maps").read_text()
            except OSError:
                continue  # the process has ended
            yield from (path for path in present if path in maps)


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("kvtier")


def _left_since(before: set[str]) -> set[str]:
    """Resources that are new, after some patience for those that are just ending."""
    deadline = time.monotonic() + _PATIENCE_S
    pause_s = _LOOK_S
    while True:
        left = held() - before
        if not left or time.monotonic() > deadline:
            return left
        if pause_s > _LOOK_S:  # not at first: a collection holds up the threads that are ending
            gc.collect()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_LOOK_S)


def _descriptors() -> Iterator[str]:
    """Open descriptors, except those that libraries open once per process: a map of generated code for profilers, and
    the system's files about its processors."""
    code_map = f"/perf-{os.getpid()}.map"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor of the listing itself
        is_librarys = target.endswith(code_map) or target.startswith(_PROCESSORS)
        if not is_librarys and not target.endswith("/fd") and "/proc/" not in target:
            yield f"fd {fd} {target}"


def _children(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path("/proc", str(pid), "task").iterdir())
    except OSError:
        return  # the process has ended
    for task in tasks:
        try:
            yield from map(int, (task / "children").read_text().split())
        except OSError:
            continue  # a thread that has just ended, or a kernel without this file
