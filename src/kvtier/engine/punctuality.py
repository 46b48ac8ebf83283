"""Hands out tokens when they are due, though other threads of this process have work to do. No torch.

A thread that loads has Python's interpreter for a fraction of a millisecond at a time, and whoever wants it then waits.
So the engine's thread takes it a moment before a step is over, and keeps it until the tokens are out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

_MAX_KEPT_S = 0.001
"""So long a step is waited for at most with the interpreter kept. The product for its logits takes a third of that."""

_INTERVAL_S = 0.01
"""Meanwhile, nobody may ask for the interpreter sooner."""


class Due(Protocol):
    """Results of a step."""

    @property
    def is_done(self) -> bool: ...

    def wait_until_due(self) -> None:
        """Others have the interpreter until the results are almost there."""
        ...


@contextlib.contextmanager
def handing_out(results: Due, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Hand out results within. They are there, unless that takes too long: then others have the interpreter again."""
    results.wait_until_due()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_keeping_interpreter())
        end_at = clock() + _MAX_KEPT_S
        while not results.is_done:
            if clock() >= end_at:
                stack.close()
                break
        yield


@contextlib.contextmanager
def _keeping_interpreter() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    if usual_s >= 0.9 * _INTERVAL_S:  # another engine of this process is at it, and puts it back
        yield
        return
    sys.setswitchinterval(_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
