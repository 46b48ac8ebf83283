"""How long steps take, seen from the thread that queues them on the device. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_NUM_STEPS = 8


class StepPace:
    """The shortest of the last steps. One thread notes; any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._lasting_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self.is_idle = False
        """The device has nothing to compute, until the next step."""
        self.shortest_s = 0.0
        """0 before two steps in a row have computed something."""

    def note_step(self, *, is_idle: bool) -> None:
        """A step begins that computes something, or nothing if the engine `is_idle`."""
        now = self._clock()
        if self._began_at is not None and not is_idle:
            self._lasting_s.append(now - self._began_at)
            self.shortest_s = min(self._lasting_s)
        self._began_at = None if is_idle else now
        self.is_idle = is_idle
