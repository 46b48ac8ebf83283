"""A part's reports to its supervisor, each a line of JSON in a pipe: its progress, that it is ready, why it is not."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

_EVERY_S = 0.5


class _Report(msgspec.Struct, frozen=True, tag_field="kind"):
    pass


class Progressed(_Report, frozen=True, tag="progressed"):
    """`done` of `total` bytes of the work in `title`."""

    title: str
    done: int
    total: int


class Ready(_Report, frozen=True, tag="ready"):
    """The part serves. `properties` are shown to users, by name."""

    properties: dict[str, object]


class Failed(_Report, frozen=True, tag="failed"):
    """The part cannot start, and why."""

    sentence: str


Report = Progressed | Ready | Failed


def decode_report(line: bytes) -> Report:
    report: Report = msgspec.json.decode(line, type=Report)
    return report


class Reporter:
    """The part's end of the pipe. If the supervisor is gone, reports are lost without an error."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def tell(self, report: Report) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")

    @contextlib.contextmanager
    def progress(self, title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """A scope with a function to call with the number of further bytes done; reports at most twice a second."""
        done, told_at = 0, 0.0

        def advance(nbytes: int) -> None:
            nonlocal done, told_at
            done += nbytes
            now = time.monotonic()
            if now - told_at >= _EVERY_S or done >= total_bytes:
                told_at = now
                self.tell(Progressed(title, done, total_bytes))

        yield advance
