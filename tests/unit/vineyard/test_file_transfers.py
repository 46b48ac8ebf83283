"""Segments of chunks over threads: each once, and no further than the first failure."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from contextlib import closing

import pytest

from kvtier.stores.staging import SegmentStaging
from kvtier.vineyard.chunk_files import Segment
from kvtier.vineyard.chunk_transfers import ChunkTransfers, Direction


class Chunk:
    """Notes what is done to it; fails in a step of a segment if told so. Late ones take their time."""

    def __init__(
        self, fails_at: tuple[str, int] | None = None, error: BaseException | None = None, is_late: bool = False
    ) -> None:
        self._is_late = is_late
        self.steps: Counter[tuple[str, int]] = Counter()
        self.num_closed = 0
        self._fails_at = fails_at
        self._error = error or OSError(errno.EIO, "told so")
        self._lock = threading.Lock()

    def start(self, number: int) -> Segment:
        self._note("start", number)
        return Segment(number, SegmentStaging(4096), [])

    def finish(self, segment: Segment) -> None:
        assert self.steps["start", segment.number] == 1
        self._note("finish", segment.number)

    def close(self) -> None:
        self.num_closed += 1

    def _note(self, step: str, number: int) -> None:
        if self._fails_at == (step, number):
            raise self._error
        if self._is_late:
            time.sleep(0.05)
        with self._lock:
            self.steps[step, number] += 1


_ALL = {(step, number): 1 for step in ("start", "finish") for number in range(5)}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("io_workers", "num_chunks"), [(1, 1), (1, 7), (3, 7), (8, 3)])
def test_every_segment_takes_both_steps_once_and_every_chunk_is_closed(
    direction: Direction, io_workers: int, num_chunks: int
) -> None:
    chunks = [Chunk() for _ in range(num_chunks)]
    made: list[int] = []

    def make(index: int) -> Chunk:
        made.append(index)
        return chunks[index]

    with closing(ChunkTransfers(io_workers)) as transfers:
        assert transfers.move(direction, num_chunks, 5, make) is None

    assert made == list(range(num_chunks))
    assert all(chunk.steps == _ALL and chunk.num_closed == 1 for chunk in chunks)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("step", ["start", "finish"])
@pytest.mark.parametrize("io_workers", [1, 4])
def test_what_is_before_a_failure_is_whole_and_little_behind_it_is_begun(
    direction: Direction, step: str, io_workers: int
) -> None:
    chunks = [Chunk((step, 2) if index == 3 else None, is_late=index > 5) for index in range(60)]

    with closing(ChunkTransfers(io_workers)) as transfers:
        error = transfers.move(direction, 60, 5, lambda index: chunks[index])

    assert error is not None
    assert error.errno == errno.EIO
    assert all(chunk.steps == _ALL for chunk in chunks[:3])
    assert not any(chunk.steps for chunk in chunks[20:])
    assert all(chunk.num_closed for chunk in chunks if chunk.steps)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("step", ["start", "finish"])
def test_what_no_filesystem_raises_ends_the_call_and_the_next_one_works(direction: Direction, step: str) -> None:
    chunks = [Chunk((step, 1) if index == 2 else None, KeyboardInterrupt()) for index in range(40)]

    with closing(ChunkTransfers(2)) as transfers:
        with pytest.raises(KeyboardInterrupt):
            transfers.move(direction, 40, 5, lambda index: chunks[index])

        assert transfers.move(direction, 2, 5, lambda index: Chunk()) is None


@pytest.mark.parametrize("direction", Direction)
def test_calls_of_several_threads_share_the_workers(direction: Direction) -> None:
    chunks = [[Chunk() for _ in range(9)] for _ in range(6)]
    with closing(ChunkTransfers(2)) as transfers:
        threads = [threading.Thread(target=transfers.move, args=(direction, 9, 5, own.__getitem__)) for own in chunks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert all(chunk.steps == _ALL for own in chunks for chunk in own)
