"""Ctrl-C at a chosen place of the main thread's work."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any


class InterruptAt:
    """Raises `KeyboardInterrupt` where the `place`-th Python function is entered or left, counted from 1.

    Python looks for signals at these places, also in functions of its own library. Functions written in C are none.
    """

    def __init__(self, place: int) -> None:
        self._left = place

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines = False
        if event in ("call", "return") and frame.f_code.co_filename != __file__:
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt
        return self._trace
