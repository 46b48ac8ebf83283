"""Limits repeating log lines: a dead server must not cause one line per request. Thread-safe."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_INTERVAL_S = 60.0


class LogLimit:
    """Logs one line per `subject` and minute, and reports how many were suppressed."""

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def warning(self, subject: str, message: str, *args: object) -> None:
        held_back = self._held_back(subject)
        if held_back is None:
            return
        if held_back:
            message += self._suffix(held_back)
        self._logger.warning(message, *args)

    def filter(self, record: logging.LogRecord) -> bool:
        """For `Logger.addFilter`: limits warnings of other libraries, by message."""
        if record.levelno != logging.WARNING:
            return True
        held_back = self._held_back(str(record.msg))
        if held_back:
            record.msg = f"{record.msg}{self._suffix(held_back)}"
        return held_back is not None

    def _held_back(self, subject: str) -> int | None:
        """The number of lines suppressed since the last one; None if this line must be suppressed, too."""
        now = self._clock()
        with self._lock:
            last_at, held_back = self._seen.get(subject, (float("-inf"), 0))
            if now - last_at < self._interval_s:
                self._seen[subject] = (last_at, held_back + 1)
                return None
            self._seen[subject] = (now, 0)
        return held_back

    def _suffix(self, held_back: int) -> str:
        return f" ({held_back} like it in the last {self._interval_s:.0f} s)"
