"""A circuit breaker: after failures it stays open, so that callers do not wait for a dead peer. Thread-safe."""

from __future__ import annotations

import threading

_MAX_TIMEOUTS = 3


class Breaker:
    """Opens at once if the peer is gone, and after three time-outs in a row if it is slow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._num_timeouts = 0

    @property
    def is_open(self) -> bool:
        return self._is_open

    def succeed(self) -> None:
        if self._num_timeouts:
            self._num_timeouts = 0

    def fail(self, *, timed_out: bool) -> bool:
        """Note a failure. Returns True if this one opened the breaker."""
        with self._lock:
            if self._is_open:
                return False
            if timed_out:
                self._num_timeouts += 1
                if self._num_timeouts < _MAX_TIMEOUTS:
                    return False
            self._is_open = True
            return True

    def close(self) -> None:
        """The peer works again."""
        with self._lock:
            self._is_open = False
            self._num_timeouts = 0
