"""Lowers a process's priority where processors are few."""

from __future__ import annotations

import os
import time
from pathlib import Path

_OF_SESSION = Path("/proc/self/autogroup")
_TRIES = 20
_TRY_S = 0.11


def step_back(niceness: int) -> None:
    """Let other processes come first from now on.

    Linux may share processors by session: then niceness only counts within a session, and a process that leads one has
    to lower the session, too.
    """
    os.nice(niceness)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        try:
            _OF_SESSION.write_text(str(niceness))
        except BlockingIOError:  # it was just done: all users but root share ten times a second
            time.sleep(_TRY_S)
        except OSError:  # not on every kernel
            return
        else:
            return
