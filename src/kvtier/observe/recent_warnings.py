"""Keeps the last warnings of a process's log, for the page. Thread-safe and bounded."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

import msgspec

from kvtier.observe.printable import printable

MAX_WARNINGS = 100
_MAX_CHARACTERS = 1000


class LoggedWarning(msgspec.Struct, frozen=True):
    """A line of the log. `at` is in seconds of the epoch; `level` is "warning" or "error"."""

    at: float
    level: str
    text: str


class RecentWarnings(logging.Handler):
    """Keeps the newest lines of level warning or above, at most `MAX_WARNINGS`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[LoggedWarning] = deque(maxlen=MAX_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # arguments that do not fit the message; `logging` reports that itself
            text = str(record.msg)
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self._kept.append(LoggedWarning(record.created, level, printable(text, _MAX_CHARACTERS)))

    def newest(self) -> list[LoggedWarning]:
        """The lines, newest first."""
        return list(self._kept)[::-1]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A scope in which this handler is attached to the root logger."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)
