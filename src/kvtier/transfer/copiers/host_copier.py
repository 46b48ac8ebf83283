"""The copier of a device that is the host itself: a copy is over when its call returns.

If a block is runs of bytes, the calling thread copies it. Pages of another order or size are copied by the copier's own
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from kvtier.errors import TierUnavailable
from kvtier.memory.copying import copy_blocks
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copier import Copies, Mark
from kvtier.transfer.copiers.geometry import INTEGERS, ByteRun, Geometry, Pages
from kvtier.transfer.copiers.own_threads import cores, own_threads

_MAX_THREADS = 4
_RUN_BYTES = 4 << 20
"""Bytes that one thread copies per call. A smaller load or store is not worth a second thread."""


class _Done:
    """Copies that were over when their call returned, and a mark that is always past."""

    is_done = True
    num_bytes_left = 0

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def precede(self, layer: int) -> None:
        pass


_DONE = _Done()


class HostCopier:
    """A `Copier` for KV in the host's memory."""

    def __init__(self, geometry: Pages) -> None:
        self._geometry = geometry
        self._block_bytes = geometry.layout.block_bytes
        self._runs = geometry.plain_runs or []
        self._strided: _StridedCopies | None = None
        if not self._runs:
            assert isinstance(geometry, Geometry)
            self._strided = _StridedCopies(geometry)

    @property
    def is_whole(self) -> bool:
        return self._geometry.is_whole

    def mark(self) -> Mark:
        return _DONE

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        with arena.in_use():
            if self._strided is None:
                for run in self._runs:
                    device = self._geometry.run_addresses(places, run)
                    copy_blocks(device, self._in_arena(arena, offsets, run), run.nbytes)
            else:
                self._strided.copy(places, arena, offsets, is_load=True)
        return _DONE

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        with arena.in_use():
            if self._strided is None:
                for offset in offsets:
                    arena.populate(offset, self._block_bytes)
                for run in self._runs:
                    device = self._geometry.run_addresses(places, run)
                    copy_blocks(self._in_arena(arena, offsets, run), device, run.nbytes)
            else:
                self._strided.copy(places, arena, offsets, is_load=False)
        return _DONE

    def adopt(self, arena: MappedArena) -> None:
        pass

    def close(self) -> None:
        if self._strided is not None:
            self._strided.close()

    def _in_arena(self, arena: MappedArena, offsets: Sequence[int], run: ByteRun) -> list[int]:
        return [arena.address + offset for offset in self._geometry.run_offsets(offsets, run)]


class _StridedCopies:
    """Copies of pages that hold a block's numbers in another order, by threads.

    A call holds the GIL while it works out the addresses, then not again until it is done. In a loop of small copies,
    each would wait for the GIL, which an engine holds most of the time.
    """

    def __init__(self, geometry: Geometry) -> None:
        layout = geometry.layout
        self._geometry = geometry
        self._integers = INTEGERS[layout.itemsize]
        self._halves = [
            [(layers, tensor.view(self._integers)) for layers, tensor in stack] for stack in geometry.halves()
        ]
        self._max_run_parts = max(1, _RUN_BYTES * geometry.parts_per_block // layout.block_bytes)
        self._num_threads = min(_MAX_THREADS, len(cores()))
        self._threads = own_threads(self._num_threads, "kvtier-pages")

    def copy(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], *, is_load: bool) -> None:
        """Raises `TierUnavailable` if this is closed."""
        layout = self._geometry.layout
        self._geometry.check(places, arena, offsets)
        assert not any(offset % layout.itemsize for offset in offsets), "numbers begin at multiples of their size"
        runs = list(_runs(self._parts(places, offsets), self._max_run_parts))
        num_shares = min(self._num_threads, len(runs), -(-len(offsets) * layout.block_bytes // _RUN_BYTES))
        for start, nbytes in neighbours(offsets, layout.slot_bytes, arena.nbytes):
            arena.populate(start, nbytes)
        copying: list[Future[None]] = []
        try:
            for number in range(num_shares):
                copying.append(self._threads.submit(self._copy_runs, runs[number::num_shares], arena, is_load))
        except RuntimeError as error:
            raise TierUnavailable("this copier is closed") from error
        finally:
            wait(copying)
        for one in copying:
            one.result()

    def close(self) -> None:
        self._threads.shutdown()

    def _copy_runs(self, runs: Sequence[_Run], arena: MappedArena, is_load: bool) -> None:
        memory = (ctypes.c_ubyte * arena.nbytes).from_address(arena.address)
        count = arena.nbytes // self._geometry.layout.itemsize
        numbers = torch.frombuffer(memory, dtype=self._integers, count=count)
        in_pages, in_arena = [], []
        for run in runs:
            for half, stack in enumerate(self._halves):
                for layers, tensor in stack:
                    in_pages.append(self._in_pages(run, tensor))
                    in_arena.append(self._in_arena(run, numbers, layers, half))
        with torch.inference_mode():  # an engine's tensors may be from this mode, which forbids writes outside it
            torch._foreach_copy_(*((in_pages, in_arena) if is_load else (in_arena, in_pages)))

    def _parts(self, places: Sequence[int], offsets: Sequence[int]) -> Iterator[_Part]:
        geometry = self._geometry
        per_page, part_tokens, itemsize = geometry.parts_per_page, geometry.part_tokens, geometry.layout.itemsize
        for place, offset in zip(places, geometry.part_offsets(offsets), strict=True):
            yield _Part(place // per_page, place % per_page * part_tokens, offset // itemsize)

    def _in_pages(self, run: _Run, tensor: torch.Tensor) -> torch.Tensor:
        """`(parts, layers, heads, tokens, head_dim)` of one half, over the engine's memory."""
        layers, _, heads, _, head_dim = tensor.shape
        by_layer, by_page, by_head, by_token, by_dim = tensor.stride()
        first, step = run.first, run.step
        return tensor.as_strided(
            (run.count, layers, heads, self._geometry.part_tokens, head_dim),
            (step.page * by_page + step.inside * by_token, by_layer, by_head, by_token, by_dim),
            tensor.storage_offset() + first.page * by_page + first.inside * by_token,
        )

    def _in_arena(self, run: _Run, numbers: torch.Tensor, layers: slice, half: int) -> torch.Tensor:
        """The same numbers in the arena."""
        geometry, layout = self._geometry, self._geometry.layout
        by_token = 2 * layout.head_dim
        by_head = layout.block_tokens * by_token
        by_layer = layout.kv_heads * by_head
        return numbers.as_strided(
            (run.count, layers.stop - layers.start, geometry.num_heads, geometry.part_tokens, layout.head_dim),
            (run.step.at, by_layer, by_head, by_token, 1),
            run.first.at + layers.start * by_layer + geometry.first_head * by_head + half * layout.head_dim,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The section of one block in one page: from token `inside` of `page` on, and from number `at` of the arena."""

    page: int
    inside: int
    at: int

    def __sub__(self, other: _Part) -> _Part:
        return _Part(self.page - other.page, self.inside - other.inside, self.at - other.at)

    @property
    def is_step(self) -> bool:
        """Whether parts may be at this distance in one view: torch has no negative strides."""
        return self.page >= 0 and self.inside >= 0 and self.at > 0


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` parts, each `step` after the one before it."""

    first: _Part
    step: _Part
    count: int


_NOWHERE = _Part(0, 0, 0)


def _runs(parts: Iterable[_Part], max_parts: int) -> Iterator[_Run]:
    """All parts, in as few runs of at most `max_parts` as one pass over them finds."""
    first = last = step = _NOWHERE
    count = 0
    for part in parts:
        distance = part - last
        if 0 < count < max_parts and distance.is_step and (count == 1 or distance == step):
            step, count = distance, count + 1
        else:
            if count:
                yield _Run(first, step, count)
            first, step, count = part, _NOWHERE, 1
        last = part
    if count:
        yield _Run(first, step, count)


def neighbours(offsets: Sequence[int], slot_bytes: int, arena_bytes: int) -> Iterator[tuple[int, int]]:
    """The slots at `offsets` as (offset, size) of ranges, one for each row of adjacent slots."""
    start = end = 0
    for offset in sorted(offsets):
        if offset != end and end > start:
            yield start, end - start
        start = start if offset == end and end > start else offset
        end = min(offset + slot_bytes, arena_bytes)
    if end > start:
        yield start, end - start
