"""Counting calls: what code costs, without a clock."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """A list that grows by one with every call of a function, of Python or of C, on this thread within the scope."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
