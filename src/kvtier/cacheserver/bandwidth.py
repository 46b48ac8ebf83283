"""Limits the bytes per second that a tenant moves over all of its connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_S = 0.25
"""Bandwidth left unused may still be used this much later."""


class Bandwidth:
    """At most `bytes_per_s`, unless that is None. Thread-safe."""

    def __init__(self, bytes_per_s: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, nbytes: int) -> float:
        """Record `nbytes` moved. Returns the seconds to wait before moving more."""
        rate = self.bytes_per_s
        if rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - _BURST_S) + nbytes / rate
            return max(0.0, self._free_at - now)
