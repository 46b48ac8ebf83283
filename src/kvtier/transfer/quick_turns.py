"""Shortens the interpreter's switch interval while a request waits for another thread's work. No torch.

The default is five milliseconds. A lookup or a load takes the GIL a few times; where an engine's scheduler and worker
share a process, each time could cost as much as everything else together.
"""

from __future__ import annotations

import sys
import threading

_INTERVAL_S = 0.0005


class QuickTurns:
    """Between `begin` and the last matching `end`, threads take turns quickly; afterwards as before. Any thread."""

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._num_begun = 0
        self._before_s: float | None = None

    def begin(self) -> None:
        with self._lock:
            self._num_begun += 1
            found_s = sys.getswitchinterval()
            if self._num_begun == 1 and found_s > self._interval_s:
                self._before_s = found_s
                sys.setswitchinterval(self._interval_s)

    def end(self) -> None:
        with self._lock:
            self._num_begun -= 1
            if self._num_begun or self._before_s is None:
                return
            if sys.getswitchinterval() <= self._interval_s:  # otherwise other code has set one since
                sys.setswitchinterval(self._before_s)
            self._before_s = None


QUICK_TURNS = QuickTurns()
"""The process has a single switch interval, hence a single instance."""
