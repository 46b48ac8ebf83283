"""A cache server's hit curve, read every few seconds only: it costs the server more than the other stats."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 10.0


class CurveCache:
    """Used by one thread at a time."""

    def __init__(
        self, read: Callable[[], dict[str, object] | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`read` returns the answer to a `MissCurveRequest`, or None."""
        self._read = read
        self._clock = clock
        self._read_at: float | None = None
        self._points: object = None

    def points(self) -> object:
        """Pairs of a size in bytes and the share of tokens that would hit, unchecked; None if the server has none."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= _EVERY_S:
            self._read_at = now
            document = self._read()
            self._points = None if document is None else document.get("points")
        return self._points
