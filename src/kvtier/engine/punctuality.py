"""Hands out tokens when they are due, though other threads of this process have work to do. No torch.

A thread that loads has Python's interpreter for a fraction of a millisecond at a time, and whoever wants it then waits.
So the engine's thread asks for it a moment before a step is over, gets it at once, and keeps it until the tokens are
out.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

_ASKING_S = 5e-5
"""How soon a thread gives the interpreter up when it is asked to, while this one computes nothing."""

_KEPT_S = 0.01
"""And while tokens are handed out."""

_MAX_WAIT_S = 0.001
"""So long a step is waited for at most with the interpreter kept. The product for its logits takes a third of that."""

_adjusting = threading.Lock()


class Due(Protocol):
    """Results of a step."""

    @property
    def is_done(self) -> bool: ...

    def wait_until_due(self) -> None:
        """Others have the interpreter until the results are almost there."""
        ...


@contextlib.contextmanager
def handing_out(results: Due, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Hand out results within. They are there, unless that takes too long: then others have the interpreter again.

    If another engine of this process hands out just now, nothing is done here.
    """
    if not _adjusting.acquire(blocking=False):
        yield
        return
    usual_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(min(_ASKING_S, usual_s))
        results.wait_until_due()
        sys.setswitchinterval(max(_KEPT_S, usual_s))
        end_at = clock() + _MAX_WAIT_S
        while not results.is_done:
            if clock() >= end_at:
                sys.setswitchinterval(usual_s)
                break
        yield
    finally:
        sys.setswitchinterval(usual_s)
        _adjusting.release()
