"""vLLM's output: passed on, and remembered as far as it may say why vLLM ended. One thread of its own reads it.

A failed start writes its cause first, in the process where it happened, and then long tracebacks of all the others. So
errors are remembered as they come, and not looked for in the last lines.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from kvtier.observe.printable import printable

_LAST_WAIT_S = 0.25
_END_S = 20.0
_MAX_LINE_BYTES = 1 << 16
_LAST_LINES = 3
_SHOWN_ERRORS = 3
_MAX_ERRORS = 64
_MAX_CHARACTERS = 1000
"""Of a line or error that is remembered."""

_RECENT_S = 60.0
"""An older error is not why a running vLLM ended."""

_ERROR = re.compile(r"\b\w*(?:Error|Exception|error): .*|\bValue error, .*")
_NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d |\b\w*(?:Error|Exception): \d+ validation errors? for ")
"""A line that only warns of an error; or one whose next lines say what is wrong."""


class VllmLog:
    """What vLLM writes to `stream`."""

    def __init__(self, stream: IO[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._errors: dict[str, float] = {}
        self._is_start_over = False
        self._thread = threading.Thread(target=self._pass_on, name="kvtier-vllm-log", daemon=True)
        self._thread.start()

    def note_ready(self) -> None:
        """From here on, only recent errors may be why vLLM ends."""
        self._is_start_over = True

    def last_words(self) -> str:
        """The end of a sentence: the first errors, or else the last lines. Call when vLLM has ended."""
        self._thread.join(_LAST_WAIT_S)  # its last output is on its way
        oldest = self._clock() - _RECENT_S if self._is_start_over else 0.0
        errors = [error for error, seen_at in dict(self._errors).items() if seen_at >= oldest]
        words = errors[:_SHOWN_ERRORS] or list(self._last)
        return f"; its log says: {' / '.join(map(printable, words))}" if words else ""

    def close(self) -> None:
        """Call when its writers have ended."""
        self._thread.join(_END_S)
        self._stream.close()

    def _pass_on(self) -> None:
        out = sys.stderr.buffer
        while line := self._stream.readline(_MAX_LINE_BYTES):
            self._remember(line.decode(errors="replace").strip())
            with contextlib.suppress(OSError):
                out.write(line)
                out.flush()

    def _remember(self, line: str) -> None:
        if not line:
            return
        self._last.append(line[-_MAX_CHARACTERS:])
        error = None if _NO_ERROR.search(line) else _ERROR.search(line)
        if error is None:
            return
        self._errors[error[0][:_MAX_CHARACTERS]] = self._clock()
        if len(self._errors) > _MAX_ERRORS:
            del self._errors[next(iter(self._errors))]
