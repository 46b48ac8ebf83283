"""Copies blocks that lie in pages as many short runs: kernels gather them in a small memory of the device.

Whole blocks are copied from and to that memory, chunk by chunk: while one chunk is copied, the kernel works on the
next. Needs Triton.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import torch

from kvtier.memory.cuda import CopyDirection
from kvtier.memory.mapped import MappedArena
from kvtier.memory.registered import RegisteredArenas, RowShape
from kvtier.transfer.copier import Mark
from kvtier.transfer.copiers.geometry import Geometry
from kvtier.transfer.copiers.page_kernels import PageMoves

_NUM_CHUNKS = 2


class _Chunk:
    """Device memory for some blocks, and when it was last filled and freed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.filled = torch.cuda.Event()
        self.free = torch.cuda.Event()


class Staging:
    """One direction: a stream for copies, one for kernels, and chunks, used in turn by the thread that has `lock`."""

    def __init__(
        self, geometry: Geometry, arenas: RegisteredArenas, copies: torch.cuda.Stream, priority: int, chunk_bytes: int
    ) -> None:
        """Compiles the kernels: the first pages go to staging and back, unchanged."""
        layout = geometry.layout
        head_bytes = layout.block_bytes // (layout.layers * layout.kv_heads)
        self._geometry = geometry
        self._arenas = arenas
        self._rows = RowShape(geometry.num_heads * head_bytes, layout.layers, layout.kv_heads * head_bytes)
        self._first_byte = geometry.first_head * head_bytes
        self._chunk_blocks = max(1, chunk_bytes // (self._rows.nbytes * self._rows.count))
        self._moves = PageMoves(geometry)
        self.lock = threading.Lock()
        self._copies = copies
        self.kernels = torch.cuda.Stream(geometry.device, priority=priority)
        chunks = [_Chunk(self._moves.new_staging(self._chunk_blocks)) for _ in range(_NUM_CHUNKS)]
        self._chunks = itertools.cycle(chunks)
        if geometry.parts_per_block <= geometry.num_pages * geometry.parts_per_page:
            table = self._moves.table(range(geometry.parts_per_block))
            self._moves.gather(table, chunks[0].memory)
            self._moves.scatter(table, chunks[0].memory)
        torch.cuda.current_stream(geometry.device).synchronize()

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> torch.cuda.Stream:
        """Hand over chunk after chunk. The last work is on the returned stream."""
        with torch.cuda.stream(self.kernels):
            self.kernels.wait_event(after)
            for chunk, some_offsets, some_places in self._cut(offsets, places):
                self._copies.wait_event(chunk.free)
                self._copy(chunk, arena, some_offsets, CopyDirection.TO_DEVICE)
                chunk.filled.record(self._copies)
                table = self._moves.table(some_places)
                self.kernels.wait_event(chunk.filled)
                self._moves.scatter(table, chunk.memory)
                chunk.free.record(self.kernels)
        return self.kernels

    def store(
        self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark
    ) -> torch.cuda.Stream:
        """Like `load`."""
        with torch.cuda.stream(self.kernels):
            self.kernels.wait_event(after)
            for chunk, some_offsets, some_places in self._cut(offsets, places):
                table = self._moves.table(some_places)
                self.kernels.wait_event(chunk.free)
                self._moves.gather(table, chunk.memory)
                chunk.filled.record(self.kernels)
                self._copies.wait_event(chunk.filled)
                self._copy(chunk, arena, some_offsets, CopyDirection.TO_HOST)
                chunk.free.record(self._copies)
        return self._copies

    def _cut(
        self, offsets: Sequence[int], places: Sequence[int]
    ) -> Iterator[tuple[_Chunk, Sequence[int], Sequence[int]]]:
        count, parts = self._chunk_blocks, self._geometry.parts_per_block
        for first in range(0, len(offsets), count):
            end = first + count
            yield next(self._chunks), offsets[first:end], places[first * parts : end * parts]

    def _copy(self, chunk: _Chunk, arena: MappedArena, offsets: Sequence[int], direction: CopyDirection) -> None:
        rows, first, stream = self._rows, chunk.memory.data_ptr(), self._copies.cuda_stream
        nbytes = rows.nbytes * rows.count
        device = [first + number * nbytes for number in range(len(offsets))]
        if self._geometry.is_whole:
            self._arenas.copy(device, arena, offsets, nbytes, direction, stream)
        else:
            starts = [offset + self._first_byte for offset in offsets]
            self._arenas.copy_rows(device, arena, starts, rows, direction, stream)
