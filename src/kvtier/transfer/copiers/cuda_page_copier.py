"""Moves blocks between an engine's pages on a GPU and arenas of this host, on streams beside the engine's.

Where a block lies in the pages as a few long runs, the device copies those itself. Else kernels bring blocks together
in a little memory of the device, and whole blocks are copied from and to that: chunk after chunk, so that while one is
copied the kernel works on the next. Loads and stores do not wait for each other.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.memory.cuda import PIECE_BYTES, Direction, Registration, load_cudart
from kvtier.memory.mapped import MappedArena
from kvtier.memory.registered import RegisteredArenas, RowShape
from kvtier.transfer.copiers.page_copier import INTEGERS, Mark, check_places
from kvtier.transfer.copiers.page_kernels import PageMoves
from kvtier.transfer.copiers.paged_kv import PagedKv, PageOrder

_MIN_RUN_BYTES = 128 << 10
"""Copies of less than this leave the bus idle."""
_CALL_COPIES = 64
"""Copies handed over in a call. That costs a microsecond each, and only then does the device begin on them."""
_CHUNK_BYTES = 16 << 20
_NUM_CHUNKS = 2


class Way(enum.Enum):
    """How blocks go: as the runs that they are in the pages, or brought together first."""

    DIRECT = enum.auto()
    STAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` that are side by side in the pages, from `device_bytes` after where a part of a block begins in the
    first layer, and in the block, from `block_bytes` after where that part begins."""

    device_bytes: int
    block_bytes: int
    nbytes: int


def runs_of(tensors: Sequence[torch.Tensor], layout: KvLayout, first_head: int) -> list[Run]:
    """The runs of what lies in one page of one block, in the order of the block."""
    first, itemsize = tensors[0], layout.itemsize
    _, num_heads, page_tokens, width = first.shape
    _, head_stride, token_stride, dim_stride = first.stride()
    if dim_stride != 1:
        return [Run(0, 0, itemsize)]
    row_bytes = width * itemsize
    runs: list[Run] = []
    for layer, head, token in itertools.product(
        range(layout.layers), range(num_heads), range(min(page_tokens, layout.block_tokens))
    ):
        device = tensors[layer].data_ptr() - first.data_ptr() + (head * head_stride + token * token_stride) * itemsize
        row = (layer * layout.kv_heads + first_head + head) * layout.block_tokens + token
        last = runs[-1] if runs else None
        if last and (device, row * row_bytes) == (last.device_bytes + last.nbytes, last.block_bytes + last.nbytes):
            runs[-1] = Run(last.device_bytes, last.block_bytes, last.nbytes + row_bytes)
        else:
            runs.append(Run(device, row * row_bytes, row_bytes))
    return runs


class _Chunk:
    """Memory of the device for some blocks, and when it was last let go."""

    def __init__(self, num_blocks: int, moves: PageMoves, like: torch.Tensor) -> None:
        self.memory = torch.empty((num_blocks, *moves.block_shape), dtype=like.dtype, device=like.device)
        self.filled = torch.cuda.Event()
        self.free = torch.cuda.Event()


class _Lane:
    """One direction: a stream of copies, one of kernels, and chunks, which are used in turns by who has the lock."""

    def __init__(self, device: torch.device, priority: int, chunks: Sequence[_Chunk]) -> None:
        self.lock = threading.Lock()
        self.copies = torch.cuda.Stream(device, priority=priority)
        self.kernels = torch.cuda.Stream(device, priority=priority)
        self.chunks = itertools.cycle(chunks)

    def settle(self) -> None:
        """What was handed over still uses the memory."""
        with contextlib.suppress(RuntimeError):
            self.copies.synchronize()
            self.kernels.synchronize()


class CudaPageCopier:
    """A `PageCopier` for tensors on a GPU, in rows. Closed after all who copy, and before the arenas it adopted."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: KvLayout,
        *,
        first_head: int = 0,
        way: Way | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """As `PagedKv`; also raises `TierUnavailable` when torch's CUDA runtime cannot be found.

        No engine may use the pages meanwhile. `way` is chosen from how the tensors lie, unless given.
        """
        self._kv = PagedKv(tensors, layout, PageOrder.ROWS, first_head=first_head)
        if any(tensor.stride() != tensors[0].stride() for tensor in tensors):
            raise ConfigError("the KV tensors of layers have different strides")
        self._tensors = [tensor.view(INTEGERS[layout.itemsize]) for tensor in tensors]
        self._layout = layout
        self._device = tensors[0].device
        self._runs = runs_of(tensors, layout, first_head)
        self.way = way or (Way.DIRECT if min(run.nbytes for run in self._runs) >= _MIN_RUN_BYTES else Way.STAGED)
        self._moves = PageMoves(self._tensors, layout.block_tokens)
        head_bytes = layout.block_bytes // (layout.layers * layout.kv_heads)
        self._rows = RowShape(self._kv.num_heads * head_bytes, layout.layers, layout.kv_heads * head_bytes)
        self._first_byte = first_head * head_bytes
        self._part_bytes = head_bytes // layout.block_tokens * self._moves.part_tokens
        self._chunk_blocks = max(1, chunk_bytes // (self._rows.nbytes * self._rows.count))
        self._condition = threading.Condition()
        self._is_closed = False
        self._num_copying = 0
        self._cudart = load_cudart((int(torch.version.cuda.split(".")[0]),))
        self._forgotten: queue.SimpleQueue[Registration | None] = queue.SimpleQueue()
        self._arenas = RegisteredArenas(
            self._cudart, self._device.index, layout.slot_bytes, self._forgotten.put, piece_bytes
        )
        with torch.cuda.device(self._device):
            # A request waits for loads; for stores nobody does.
            self._loads, self._stores = (_Lane(self._device, priority, self._new_chunks()) for priority in (-1, 0))
            self._warm_up()
        self._thread = threading.Thread(target=self._end_forgotten, name="kvtier-pages", daemon=True)
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        return self._kv.is_whole

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        self._copy(self._loads, Direction.TO_DEVICE, pages, blocks, arena, offsets, after)

    def store(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        self._copy(self._stores, Direction.TO_HOST, pages, blocks, arena, offsets, after)

    def adopt(self, arena: MappedArena) -> None:
        """Register it in the background. Until then, and if that fails, copies are right but slow.

        It stays registered, and mapped, until this copier closes or nobody else has a reference to it.
        """
        self._arenas.adopt(arena)

    def registration(self, arena: MappedArena) -> Registration | None:
        """What `adopt` has begun."""
        return self._arenas.registration(arena)

    def close(self) -> None:
        """Wait for all copies, and unregister. Copies asked for from now on raise `TierUnavailable`."""
        with self._condition:
            self._is_closed = True
            self._condition.wait_for(lambda: not self._num_copying)
        self._forgotten.put(None)
        self._thread.join()
        with torch.cuda.device(self._device):
            self._arenas.close()

    # --- copies ----------------------------------------------------------------------------------------------------

    def _copy(
        self,
        lane: _Lane,
        direction: Direction,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        check_places(self._layout, self._kv.num_pages, self._kv.page_tokens, pages, blocks, arena, offsets)
        if not blocks:
            return
        act = self._copy_runs if self.way is Way.DIRECT else self._copy_staged
        with self._copying(), arena.in_use(), torch.cuda.device(self._device):
            try:
                with lane.lock:
                    done = act(lane, direction, pages, blocks, arena, offsets, after)
                done.synchronize()
            except BaseException as error:
                lane.settle()
                if isinstance(error, RuntimeError):
                    raise TierUnavailable(f"the device failed: {error}") from error
                raise

    def _copy_runs(
        self,
        lane: _Lane,
        direction: Direction,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> torch.cuda.Event:
        """Hand over every run of every part. The event is after them."""
        if after is not None:
            lane.copies.wait_event(after)
        for first in range(0, len(blocks), _CALL_COPIES):
            part = slice(first, first + _CALL_COPIES)
            places = self._moves.places(pages, blocks[part])
            addresses = [self._moves.address_of(place) for parts in places for place in parts]
            begins = [
                offset + number * self._part_bytes for offset in offsets[part] for number in range(len(places[0]))
            ]
            for run in self._runs:
                device = [address + run.device_bytes for address in addresses]
                host = [begin + run.block_bytes for begin in begins]
                self._arenas.copy(device, arena, host, run.nbytes, direction, lane.copies.cuda_stream)
        return _event_on(lane.copies)

    def _copy_staged(
        self,
        lane: _Lane,
        direction: Direction,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> torch.cuda.Event:
        """Hand over chunk after chunk. The event is after the last."""
        if after is not None:
            lane.kernels.wait_event(after)
        with torch.cuda.stream(lane.kernels):
            for first, chunk in zip(range(0, len(blocks), self._chunk_blocks), lane.chunks, strict=False):
                part = slice(first, first + self._chunk_blocks)
                if direction is Direction.TO_DEVICE:
                    lane.copies.wait_event(chunk.free)
                    self._copy_chunk(lane, direction, chunk, arena, offsets[part])
                    chunk.filled.record(lane.copies)
                    table = self._table(pages, blocks[part])
                    lane.kernels.wait_event(chunk.filled)
                    self._moves.scatter(table, chunk.memory)
                    chunk.free.record(lane.kernels)
                else:
                    table = self._table(pages, blocks[part])
                    lane.kernels.wait_event(chunk.free)
                    self._moves.gather(table, chunk.memory)
                    chunk.filled.record(lane.kernels)
                    lane.copies.wait_event(chunk.filled)
                    self._copy_chunk(lane, direction, chunk, arena, offsets[part])
                    chunk.free.record(lane.copies)
        return _event_on(lane.kernels if direction is Direction.TO_DEVICE else lane.copies)

    def _table(self, pages: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
        """For the kernels, in the order of the current stream."""
        places = torch.tensor(self._moves.places(pages, blocks), pin_memory=True)
        return places.to(self._device, non_blocking=True)

    def _copy_chunk(
        self, lane: _Lane, direction: Direction, chunk: _Chunk, arena: MappedArena, offsets: Sequence[int]
    ) -> None:
        rows, first, stream = self._rows, chunk.memory.data_ptr(), lane.copies.cuda_stream
        nbytes = rows.nbytes * rows.count
        device = [first + number * nbytes for number in range(len(offsets))]
        if self.is_whole:
            self._arenas.copy(device, arena, offsets, nbytes, direction, stream)
        else:
            places = [offset + self._first_byte for offset in offsets]
            self._arenas.copy_rows(device, arena, places, rows, direction, stream)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        with self._condition:
            if self._is_closed:
                raise TierUnavailable("this copier is closed")
            self._num_copying += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_copying -= 1
                self._condition.notify_all()

    # --- memory of the device --------------------------------------------------------------------------------------

    def _new_chunks(self) -> list[_Chunk]:
        if self.way is Way.DIRECT:
            return []
        return [_Chunk(self._chunk_blocks, self._moves, self._tensors[0]) for _ in range(_NUM_CHUNKS)]

    def _warm_up(self) -> None:
        """Compile the kernels now: the first page goes to staging and comes back as it was."""
        if self.way is Way.STAGED:
            num_pages = math.ceil(self._layout.block_tokens / self._kv.page_tokens)
            if num_pages > self._kv.num_pages:
                return
            table = self._table(range(num_pages), [0])
            memory = torch.empty((1, *self._moves.block_shape), dtype=self._tensors[0].dtype, device=self._device)
            self._moves.gather(table, memory)
            self._moves.scatter(table, memory)
        torch.cuda.current_stream(self._device).synchronize()

    # --- the copier's own thread -----------------------------------------------------------------------------------

    def _end_forgotten(self) -> None:
        torch.cuda.set_device(self._device)
        while (registration := self._forgotten.get()) is not None:
            self._arenas.end(registration)


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
