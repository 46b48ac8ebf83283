"""How a process steps back where processors are few."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_OF_SESSION = Path("/proc/self/autogroup")


def step_back(niceness: int) -> None:
    """Others come first from now on.

    Linux may share processors out by sessions: niceness then counts within a session only, and a process that leads one
    has to lower the session, too.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # not on every kernel
            _OF_SESSION.write_text(str(niceness))
