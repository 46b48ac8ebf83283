"""The processes that a part has started: they are in its group, and end with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = re.compile(r"(/dev/shm/psm_\w+)$", re.MULTILINE)
"""The names that Python's multiprocessing uses; a killed process leaves such memory behind."""


def end_group(group: int, *, but: int = 0) -> None:
    """Kill the processes of `group`, except `but`, and remove the shared memory that they have mapped.

    The group's number must not be in use again: its leader is running, or was not waited for yet.
    """
    members = [pid for pid in _members(group) if pid != but]
    left = {path for pid in members for path in _shared_memory(pid)}
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in left:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _members(group: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getpgid(int(name)) == group:
                yield int(name)


def _shared_memory(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        return set(_SHARED_MEMORY.findall(Path("/proc", str(pid), "maps").read_text(errors="replace")))
    return set()
