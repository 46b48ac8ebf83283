"""A pytest plugin that fails a test which leaves threads, descriptors, child processes or shared memory behind.

Off unless a project asks for it with `kvtier_leaks = true` in its pytest settings.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 2.0
_PROCESSORS = "/sys/devices/system/cpu/"
_SHM_PREFIXES = ("kvtier", "psm_", "sem.mp-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "kvtier_leaks", "fail tests that leave threads, descriptors, children or shared memory", "bool", False
    )


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getini("kvtier_leaks"):
        yield
        return
    before = held()
    yield
    left = _left_since(before)
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(left)), pytrace=False)


def held() -> set[str]:
    """What this process holds now, by name."""
    return {
        *(f"thread {thread.name} {thread.ident}" for thread in threading.enumerate() if _is_ours(thread)),
        *_descriptors(),
        *(f"child {pid}" for pid in _children(os.getpid())),
        *(f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(_SHM_PREFIXES)),
    }


def shared_memory_of_others(names: set[str]) -> set[str]:
    """Which of these are mapped by living processes that are not this one's descendants, and so not its doing."""
    shared = {name for name in names if name.startswith("/dev/shm/")}
    if not shared:
        return set()
    ours = {os.getpid(), *_descendants(os.getpid())}
    others: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            try:
                maps = Path("/proc", entry, "maps").read_text()
            except OSError:
                continue  # it has ended, or is another user's
            others |= {name for name in shared if name in maps}
    return others


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("kvtier")


def _left_since(before: set[str]) -> set[str]:
    """What is new, after a moment of patience for what is ending."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        left = held() - before
        if left:
            left = (left - shared_memory_of_others(left)) & held()  # looking took a while
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()
        time.sleep(0.02)


def _descriptors() -> Iterator[str]:
    """Without what libraries open once for the process: a map of the code that they make as they run, for profilers,
    and what the system says of its processors."""
    code_map = f"/perf-{os.getpid()}.map"
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the listing's own
        is_librarys = target.endswith(code_map) or target.startswith(_PROCESSORS)
        if not is_librarys and not target.endswith("/fd") and "/proc/" not in target:
            yield f"fd {fd} {target}"


def _children(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path("/proc", str(pid), "task").iterdir())
    except OSError:
        return  # it has ended
    for task in tasks:
        try:
            yield from map(int, (task / "children").read_text().split())
        except OSError:
            continue  # a thread that has just ended, or a kernel without this file
