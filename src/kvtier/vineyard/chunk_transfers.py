"""Moves chunks between memory and files, in order, by several threads at once.

A segment takes two steps: its I/O, and the processor's work (copy and checksum). A read does them in this order, a
write in the other. I/O threads do one read or write at a time, and go from one to the next without waiting; the caller
and a thread for each further core do the rest. A call's chunks are taken in order, and the first that fails ends the
call: chunks behind a gap are useless. Writes take segments of several chunks in turn, since a filesystem serialises
writes that extend one file.

A call begins once as many I/O threads are free as it can use, in order of arrival. So there are never more than three
segments in flight for each I/O thread, however many threads call.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from kvtier.vineyard.chunk_files import Segment


class Direction(enum.Enum):
    """Which of a segment's two steps is the I/O: the first in a read, the second in a write."""

    READ = enum.auto()
    WRITE = enum.auto()


class MovingChunk(Protocol):
    """A `ChunkReader` or a `ChunkWriter`."""

    def start(self, number: int) -> Segment: ...

    def finish(self, segment: Segment) -> None: ...

    def close(self) -> None: ...


class ChunkTransfers:
    """The threads of one cache. Thread-safe: calls share the I/O threads, and each caller works for its own call.

    The calling thread must not be interrupted by signals.
    """

    def __init__(self, io_workers: int) -> None:
        self._lock = threading.Lock()
        self._io_workers = io_workers
        self._num_helpers = min(io_workers, os.cpu_count() or 1) - 1
        self._turns = _Turns(io_workers)
        self._io_pool = ThreadPoolExecutor(io_workers, thread_name_prefix="kvtier-chunk-io")
        self._helper_pool = ThreadPoolExecutor(max(1, self._num_helpers), thread_name_prefix="kvtier-chunk-sums")

    def move(
        self, direction: Direction, num_chunks: int, num_segments: int, make: Callable[[int], MovingChunk]
    ) -> OSError | None:
        """Move chunks 0, 1, ... of `num_segments` each until one fails; returns the error.

        `make` makes a chunk when its turn comes; it is called by one thread at a time, in order. If it raises, the call
        ends. Afterwards nothing is in flight, and no chunk holds a file.
        """
        num_units = num_chunks * num_segments
        num_io = min(self._io_workers, num_units)
        with self._turns.take(num_io):
            return self._move(direction, _Order(num_chunks, num_segments, num_io), make)

    def _move(self, direction: Direction, order: _Order, make: Callable[[int], MovingChunk]) -> OSError | None:
        num_io = order.width
        num_helpers = min(self._num_helpers, order.num_units - 1)
        max_moving = 2 * num_io + num_helpers + 1
        if direction is Direction.READ:
            run = _Run(replace(order, width=1), make, max_moving, num_io, num_helpers + 1)
            io_step, other_step = run.start_all, run.finish_all
        else:
            run = _Run(order, make, max_moving, num_helpers + 1, num_io)
            io_step, other_step = run.finish_all, run.start_all
        threads: list[Future[None]] = []
        try:
            with self._lock:  # one order for both pools: otherwise two calls could wait for each other's threads
                for pool, step, count in (
                    (self._io_pool, io_step, num_io),
                    (self._helper_pool, other_step, num_helpers),
                ):
                    for _ in range(count):
                        threads.append(pool.submit(step))
            other_step()
        except BaseException:
            run.give_up()
            raise
        finally:
            wait(threads)  # until then they may use the caller's memory
            for chunk in run.chunks:
                chunk.close()
        for thread in threads:
            thread.result()
        return run.error

    def close(self) -> None:
        self._io_pool.shutdown()
        self._helper_pool.shutdown()


class _Turns:
    """A number of I/O threads, and the calls that wait for some of them, in order of arrival. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._taken: dict[object, int] = {}
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        ticket = object()

        def is_our_turn() -> bool:
            return self._waiting[0] is ticket and sum(self._taken.values()) + count <= self._num_threads

        try:
            with self._changed:
                self._waiting.append(ticket)
                self._changed.wait_for(is_our_turn)
                self._taken[ticket] = count
                self._waiting.popleft()
                self._changed.notify_all()
            yield
        finally:
            with self._changed:
                self._taken.pop(ticket, None)
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Order:
    """The order in which segments move: `width` chunks at a time, one segment of each in turn."""

    num_chunks: int
    num_segments: int
    width: int

    @property
    def num_units(self) -> int:
        return self.num_chunks * self.num_segments

    def unit(self, number: int) -> tuple[int, int]:
        """A chunk and one of its segments."""
        group, within = divmod(number, self.width * self.num_segments)
        first = group * self.width
        segment, chunk = divmod(within, min(self.width, self.num_chunks - first))
        return first + chunk, segment


_Moving: TypeAlias = tuple[int, MovingChunk, Segment]


class _Run:
    """One call's chunks, as far as they were made."""

    def __init__(
        self,
        order: _Order,
        make: Callable[[int], MovingChunk],
        max_moving: int,
        num_starters: int,
        num_finishers: int,
    ) -> None:
        self.chunks: list[MovingChunk] = []
        self.error: OSError | None = None
        self._end = order.num_chunks
        self._order = order
        self._make = make
        self._lock = threading.Lock()
        self._next = 0
        self._num_starters = num_starters
        self._num_finishers = num_finishers
        self._may_start = threading.Semaphore(max_moving)
        self._started: SimpleQueue[_Moving | None] = SimpleQueue()

    def give_up(self) -> None:
        """Threads that have begun start nothing more and do not wait."""
        self._fail(0, None)
        self._may_start.release(self._num_starters + 1)
        for _ in range(self._num_finishers):
            self._started.put(None)

    def start_all(self) -> None:
        """Do the first step of one segment after another, until none is left. Several threads."""
        try:
            while True:
                self._may_start.acquire()
                if not self._start_next():
                    return
        finally:
            self._may_start.release()
            with self._lock:
                self._num_starters -= 1
                is_last = not self._num_starters
            if is_last:
                for _ in range(self._num_finishers):
                    self._started.put(None)

    def finish_all(self) -> None:
        """Do the second step of started segments, until none is left. Several threads."""
        try:
            while (moving := self._started.get()) is not None:
                index, chunk, segment = moving
                try:
                    if index < self._end:
                        chunk.finish(segment)
                except OSError as error:
                    self._fail(index, error)
                self._may_start.release()
        except BaseException:
            self._fail(0, None)
            self._may_start.release(self._num_starters + 1)  # no starter waits for a finisher that does no more
            raise

    def _start_next(self) -> bool:
        """False if there is nothing left to start."""
        index = 0
        try:
            with self._lock:
                while True:
                    if self._next == self._order.num_units or not self._end:
                        return False
                    index, number = self._order.unit(self._next)
                    if index < self._end:
                        break
                    self._next += 1
                if index == len(self.chunks):
                    self.chunks.append(self._make(index))
                self._next += 1
                chunk = self.chunks[index]
            self._started.put((index, chunk, chunk.start(number)))
        except OSError as error:
            self._may_start.release()
            self._fail(index, error)
        except BaseException:
            self._fail(0, None)
            raise
        return True

    def _fail(self, index: int, error: OSError | None) -> None:
        with self._lock:
            if index < self._end:
                self._end, self.error = index, error
