"""Aligned memory for segments on their way between memory and files, kept for reuse while segments keep coming."""

from __future__ import annotations

import mmap
import threading
from collections import deque

from kvtier.memory.copying import address_of

PAGE_BYTES = 4096


class SegmentStaging:
    """Memory suitable for direct I/O: a page for a segment's head, and room for its payload."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self._view = memoryview(self.memory)
        self.head = self._view[:PAGE_BYTES]
        self.address = address_of(self._view)

    def parts_of(self, payload_bytes: int) -> list[memoryview]:
        """The head, and the payload in whole pages. The rest of the last page may be anything."""
        return [self.head, self._view[PAGE_BYTES : PAGE_BYTES + whole_pages(payload_bytes)]]


class StagingPool:
    """Stagings of one size. Thread-safe.

    There are never more than were in use at once. Call `trim` from time to time: it frees those that were not needed
    since the last call.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._idle: deque[SegmentStaging] = deque()
        self._num_unneeded = 0

    @property
    def idle_bytes(self) -> int:
        return len(self._idle) * self._nbytes

    def take(self) -> SegmentStaging:
        with self._lock:
            if self._idle:
                staging = self._idle.pop()
                self._num_unneeded = min(self._num_unneeded, len(self._idle))
                return staging
        return SegmentStaging(self._nbytes)

    def give(self, staging: SegmentStaging) -> None:
        with self._lock:
            self._idle.append(staging)

    def trim(self) -> None:
        with self._lock:
            for _ in range(self._num_unneeded):
                self._idle.popleft()
            self._num_unneeded = len(self._idle)

    def clear(self) -> None:
        """Free all that are idle."""
        with self._lock:
            self._idle.clear()
            self._num_unneeded = 0


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
