"""The memory and cores of this machine that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_GROUP = Path("/sys/fs/cgroup")
_KIB = 1024


def machine_memory_bytes() -> int:
    """Memory of the machine, or of this process's control group if that has less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _LIMITS:
        with contextlib.suppress(OSError):
            text = Path(path).read_text().strip()
            total = min(total, int(text)) if text.isdigit() else total
    return total


def available_memory_bytes(memory_info: Path = Path("/proc/meminfo"), group: Path = _GROUP) -> int:
    """Memory that is available now without swapping: of the machine, or of the control group if that has less."""
    available = machine_memory_bytes()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in memory_info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = min(available, int(line.split()[1]) * _KIB)
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - _file_bytes(group)
        available = min(available, max(0, limit - used))
    return available


def num_cores(group: Path = _GROUP) -> int:
    """Cores that this process may use, at least one: by its mask, or by its control group's share if that is less."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def _file_bytes(group: Path) -> int:
    """Bytes of cached file pages, which the group gives up when it needs room."""
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
