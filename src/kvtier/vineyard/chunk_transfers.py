"""Chunks between memory and files, in order, by several threads at once.

As many reads or writes are under way as there are workers; a thread for each core beyond that copies and sums
meanwhile. A call's chunks are taken in order, segment by segment, and the first that fails ends the call: nothing
behind a gap is of use to anyone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol


class MovingChunk(Protocol):
    """A `ChunkReader` or a `ChunkWriter`."""

    def move(self, segment: int, io_slot: threading.Semaphore) -> None: ...

    def close(self) -> None: ...


class ChunkTransfers:
    """The threads of one cache. Thread-safe; callers help with their own calls."""

    def __init__(self, io_workers: int) -> None:
        self._io_slots = threading.Semaphore(io_workers)
        self._num_threads = io_workers + min(io_workers, os.cpu_count() or 1) - 1
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kvtier-chunks")

    def move(self, num_chunks: int, num_segments: int, make: Callable[[int], MovingChunk]) -> OSError | None:
        """Move chunks 0, 1, ... of `num_segments` each until one fails; returns why.

        `make` gives a chunk when it is its turn; of one thread at a time, in order. What it raises ends the call.
        Nothing is under way any more afterwards, and no chunk holds a file.
        """
        run = _Run(num_chunks, num_segments, make, self._io_slots)
        num_helpers = min(self._num_threads, num_chunks * num_segments - 1)
        helpers = [self._pool.submit(run.work) for _ in range(num_helpers)]
        try:
            run.work()
        finally:
            wait(helpers)
            for chunk in run.chunks:
                chunk.close()
        for helper in helpers:
            helper.result()
        return run.error

    def close(self) -> None:
        self._pool.shutdown()


class _Run:
    """One call's chunks, as far as they were made."""

    def __init__(
        self, num_chunks: int, num_segments: int, make: Callable[[int], MovingChunk], io_slots: threading.Semaphore
    ) -> None:
        self.chunks: list[MovingChunk] = []
        self.error: OSError | None = None
        self._end = num_chunks
        self._num_segments = num_segments
        self._make = make
        self._io_slots = io_slots
        self._lock = threading.Lock()
        self._next = 0

    def work(self) -> None:
        """Take segments until there are none. Any thread."""
        while True:
            index = 0
            try:
                with self._lock:
                    index, segment = divmod(self._next, self._num_segments)
                    if index >= self._end:
                        return
                    if index == len(self.chunks):
                        self.chunks.append(self._make(index))
                    self._next += 1
                    chunk = self.chunks[index]
                chunk.move(segment, self._io_slots)
            except OSError as error:
                self._fail(index, error)
            except BaseException:
                self._fail(0, None)
                raise

    def _fail(self, index: int, error: OSError | None) -> None:
        with self._lock:
            if index < self._end:
                self._end, self.error = index, error
