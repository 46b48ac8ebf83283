"""A cache server's hit curve, read now and then: it takes a server longer to make than what changes every second."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 10.0


class CurveCache:
    """Used by one thread at a time."""

    def __init__(
        self, read: Callable[[], dict[str, object] | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`read` makes the document of `MissCurveRequest`, or None."""
        self._read = read
        self._clock = clock
        self._read_at: float | None = None
        self._points: object = None

    def points(self) -> object:
        """Pairs of bytes and the share of tokens that would hit, as the server says it; None if it does not."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _EVERY_S:
            self._read_at = now
            document = self._read()
            self._points = None if document is None else document.get("points")
        return self._points
