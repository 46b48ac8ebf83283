"""How much memory this machine has for us."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory_bytes() -> int:
    """Of the machine, or of our control group if that has less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _LIMITS:
        with contextlib.suppress(OSError):
            text = Path(path).read_text().strip()
            total = min(total, int(text)) if text.isdigit() else total
    return total
