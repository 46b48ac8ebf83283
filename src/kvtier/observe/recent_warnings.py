"""The last warnings of a process's log, for users who look at it from elsewhere. Thread-safe and bounded."""

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
    """One line of the log. `at` is in seconds of the epoch, `level` is "warning" or "error"."""

    at: float
    level: str
    text: str


class RecentWarnings(logging.Handler):
    """Keeps the newest lines that are warnings or worse, within `MAX_WARNINGS`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[LoggedWarning] = deque(maxlen=MAX_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # the arguments do not fit the message: logging itself reports that elsewhere
            text = str(record.msg)
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self._kept.append(LoggedWarning(record.created, level, printable(text, _MAX_CHARACTERS)))

    def newest(self) -> list[LoggedWarning]:
        """The lines, the last one first."""
        return list(self._kept)[::-1]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A scope in which it listens to the root logger."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)
