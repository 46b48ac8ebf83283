"""How long to wait before restarting a process that has died. No clock of its own."""

from __future__ import annotations

_FIRST_S = 0.5
_MAX_S = 30.0
_STEADY_S = 60.0


class Backoff:
    """Doubles each time. The failures of a process that ran for a minute are forgotten."""

    def __init__(self) -> None:
        self._num_failures = 0

    def note_failure(self, ran_s: float) -> float:
        """The process died `ran_s` seconds after it was ready, 0 if it never was. Returns how many seconds to wait."""
        if ran_s > _STEADY_S:
            self._num_failures = 0
        wait_s = min(_MAX_S, _FIRST_S * 2.0**self._num_failures)
        self._num_failures += 1
        return wait_s
