"""Hands out tokens when they are due, though other threads of this process have work to do. No torch.

A thread that loads has Python's interpreter for a fraction of a millisecond at a time, and whoever wants it then waits.
So the engine's thread takes it a moment before a step is over, as the last ones tell, and keeps it until the tokens
are out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

_MARGIN_S = 0.0003
"""So long before a step should be over the interpreter is taken."""

_MAX_KEPT_S = 0.001
"""And so long it is kept at most for a step that takes longer."""

_LOOK_S = 0.0005
"""Before that, how often to look whether a step is over sooner."""

_MAX_STEP_S = 0.02
"""Of longer steps, nobody minds a fraction of a millisecond."""

_INTERVAL_S = 0.01
"""Meanwhile, nobody may ask for the interpreter sooner."""


class Punctuality:
    """One per engine, for its thread."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._over_at = 0.0
        self._steps_s: deque[float] = deque(maxlen=2)
        """From the end of one step to that of the next, of the last two."""

    @contextlib.contextmanager
    def handing_out(self, is_done: Callable[[], bool], *, has_others: bool) -> Iterator[None]:
        """Hand out within, once the step is over, which `is_done` tells. Returns early if that takes too long.

        Without `has_others`, threads that have work to do, nothing is waited for here.
        """
        with contextlib.ExitStack() as stack:
            if has_others and self._waits_for_moment(is_done):
                stack.enter_context(_keeping_interpreter())
                self._wait_at_most(_MARGIN_S + _MAX_KEPT_S, 0.0, is_done)
                if not is_done():
                    stack.close()
            yield

    def note_over(self) -> None:
        """A step is over, and its results are here."""
        now = self._clock()
        self._steps_s.append(now - self._over_at)
        self._over_at = now

    def _waits_for_moment(self, is_done: Callable[[], bool]) -> bool:
        """Let others go on until a step is almost over; False if it is not known when that is, or far away."""
        step_s = min(self._steps_s, default=_MAX_STEP_S)
        if step_s >= _MAX_STEP_S:
            return False
        self._wait_at_most(self._over_at + step_s - _MARGIN_S - self._clock(), _LOOK_S, is_done)
        return True

    def _wait_at_most(self, timeout_s: float, look_s: float, is_done: Callable[[], bool]) -> None:
        """Look whether it is over every `look_s`; all the time, without giving way, if that is 0."""
        end_at = self._clock() + timeout_s
        while (left_s := end_at - self._clock()) > 0 and not is_done():
            if look_s:
                self._sleep(min(look_s, left_s))


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
