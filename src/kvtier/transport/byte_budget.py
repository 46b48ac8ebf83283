"""A limit on bytes that several connections take at once."""

from __future__ import annotations

import threading


class ByteBudget:
    """At most `max_bytes` are taken at a time, though a single request may exceed it. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @property
    def num_taken(self) -> int:
        return self._num_taken

    def take(self, nbytes: int, timeout_s: float) -> bool:
        """Wait for room and take it. False, taking nothing, if there is none in time."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: not self._num_taken or self._num_taken + nbytes <= self._max_bytes, timeout_s
            )
            if has_room:
                self._num_taken += nbytes
            return has_room

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._num_taken -= nbytes
            self._changed.notify_all()
