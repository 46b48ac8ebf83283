"""Hands out tokens when they are due, though other threads of this process have work to do. No torch.

A thread that loads has Python's interpreter for a fraction of a millisecond at a time, and whoever wants it then waits.
So the engine's thread asks for it a moment before a step is over, gets it at once, and keeps it until the tokens are
out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

ASKING_S = 5.1e-5
"""How soon a thread gives the interpreter up when it is asked to, while this one computes nothing."""

KEPT_S = 0.010007
"""And while tokens are handed out. Nobody else chooses such numbers: who finds one knows that it is from here."""

_MAX_WAIT_S = 0.001
"""So long a step is waited for at most with the interpreter kept. The product for its logits takes a third of that."""

_usual_s = sys.getswitchinterval()
"""What it was when it was not from here."""


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

    Other engines of this process may do the same; an interrupt may come at any time. Whoever ends last puts the usual
    interval back.
    """
    usual_s = _find_usual()
    try:
        if not results.is_done:
            sys.setswitchinterval(ASKING_S)
            results.wait_until_due()
        sys.setswitchinterval(KEPT_S)
        end_at = clock() + _MAX_WAIT_S
        while not results.is_done:
            if clock() >= end_at:
                sys.setswitchinterval(usual_s)
                break
        yield
    finally:
        sys.setswitchinterval(usual_s)


def _find_usual() -> float:
    global _usual_s
    interval_s = sys.getswitchinterval()
    if not any(abs(interval_s - own_s) < 1e-6 for own_s in (ASKING_S, KEPT_S)):
        _usual_s = interval_s
    return _usual_s
