"""Moves blocks between the pages of another engine and arenas of this host. Here: the interface, and pages that lie in
the host's memory themselves. Needs torch.

An engine's pages may be written by steps that its device has not reached yet. What orders copies with them is a *mark*,
taken by the engine's thread, after which a copy may begin.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers.own_threads import cores, own_threads
from kvtier.transfer.copiers.paged_kv import PagedKv, PageOrder

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By size. Numbers are copied as their bits: some kinds of them cannot be copied otherwise."""


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until the device is past it."""
        ...


class PageCopier(Protocol):
    """Thread-safe for different pages, but for `mark`, which is the engine's thread's."""

    @property
    def is_whole(self) -> bool:
        """Its heads are all that a block has."""
        ...

    def mark(self) -> Mark | None:
        """After all that was handed to the device so far. None where nothing is handed over."""
        ...

    def load(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        """Copy the blocks at `offsets` of `arena` into the pages; they are there when this returns.

        `pages` are those of a sequence from its start; `blocks[i]` is the place in the sequence of the block at
        `offsets[i]`. Raises `LeaseError` when the arena is closed, `TierUnavailable` when this is or the device fails.
        """
        ...

    def store(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        """The other way round. Of heads that the pages do not have, the arena keeps what it holds."""
        ...

    def adopt(self, arena: MappedArena) -> None:
        """This arena is going to be copied from and to: make that fast, in the background. A second call is free."""
        ...

    def close(self) -> None:
        """Wait for all copies, and let go of arenas. Closed before the arenas that it adopted."""
        ...


_MAX_THREADS = 4
_RUN_BYTES = 4 << 20
"""What one thread copies with one call; a smaller load or store is not worth a second thread."""


class HostPageCopier:
    """Pages in the host's memory, copied by threads of its own.

    A call holds the GIL while it works out what lies where, and then never until it is done: beside an engine that
    holds it most of the time, a loop of small copies would wait for it after each.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: KvLayout,
        order: PageOrder = PageOrder.TRANSPOSED_K,
        *,
        first_head: int = 0,
    ) -> None:
        """As `PagedKv`."""
        integers = INTEGERS[layout.itemsize]
        self._kv = PagedKv(tensors, layout, order, first_head=first_head)
        self._keys, self._values = (
            [(layers, tensor.view(integers)) for layers, tensor in stack] for stack in (self._kv.keys, self._kv.values)
        )
        self._integers = integers
        self._part_tokens = min(layout.block_tokens, self._kv.page_tokens)
        self._max_run_parts = max(1, _RUN_BYTES * layout.block_tokens // (self._part_tokens * layout.block_bytes))
        self._num_threads = min(_MAX_THREADS, len(cores()))
        self._threads = own_threads(self._num_threads, "kvtier-pages")

    @property
    def is_whole(self) -> bool:
        return self._kv.is_whole

    def mark(self) -> None:
        return None

    def load(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        self._copy(pages, blocks, arena, offsets, is_load=True)

    def store(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        after: Mark | None,
    ) -> None:
        self._copy(pages, blocks, arena, offsets, is_load=False)

    def adopt(self, arena: MappedArena) -> None:
        pass

    def close(self) -> None:
        self._threads.shutdown()

    def _copy(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        *,
        is_load: bool,
    ) -> None:
        layout = self._kv.layout
        check_places(layout, self._kv.num_pages, self._kv.page_tokens, pages, blocks, arena, offsets)
        runs = list(_runs(self._parts(pages, blocks, offsets), self._max_run_parts))
        num_shares = min(self._num_threads, len(runs), -(-len(blocks) * layout.block_bytes // _RUN_BYTES))
        with arena.in_use():
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

    def _copy_runs(self, runs: Sequence[_Run], arena: MappedArena, is_load: bool) -> None:
        memory = (ctypes.c_ubyte * arena.nbytes).from_address(arena.address)
        numbers = torch.frombuffer(memory, dtype=self._integers, count=arena.nbytes // self._kv.layout.itemsize)
        in_pages, in_arena = [], []
        for run in runs:
            for half, stack in enumerate((self._keys, self._values)):
                for layers, tensor in stack:
                    in_pages.append(self._in_pages(run, tensor))
                    in_arena.append(self._in_arena(run, numbers, layers, half))
        with torch.inference_mode():  # an engine may have made its tensors so, and they allow no writes elsewhere
            torch._foreach_copy_(*((in_pages, in_arena) if is_load else (in_arena, in_pages)))

    def _parts(self, pages: Sequence[int], blocks: Sequence[int], offsets: Sequence[int]) -> Iterator[_Part]:
        """In the order of the sequence, where neighbours are likely to lie evenly spaced on both sides."""
        layout, page_tokens, part_tokens = self._kv.layout, self._kv.page_tokens, self._part_tokens
        width = 2 * layout.head_dim
        for block, offset in sorted(zip(blocks, offsets, strict=True)):
            first_token = block * layout.block_tokens
            for place in range(0, layout.block_tokens, part_tokens):
                number, inside = divmod(first_token + place, page_tokens)
                yield _Part(pages[number], inside, offset // layout.itemsize + place * width)

    def _in_pages(self, run: _Run, tensor: torch.Tensor) -> torch.Tensor:
        """`(parts, layers, heads, tokens, head_dim)` of one half, over the engine's memory."""
        layers, _, heads, _, head_dim = tensor.shape
        by_layer, by_page, by_head, by_token, by_dim = tensor.stride()
        first, step = run.first, run.step
        return tensor.as_strided(
            (run.count, layers, heads, self._part_tokens, head_dim),
            (step.page * by_page + step.inside * by_token, by_layer, by_head, by_token, by_dim),
            tensor.storage_offset() + first.page * by_page + first.inside * by_token,
        )

    def _in_arena(self, run: _Run, numbers: torch.Tensor, layers: slice, half: int) -> torch.Tensor:
        """The same numbers in the arena."""
        layout, heads = self._kv.layout, self._kv.heads
        by_token = 2 * layout.head_dim
        by_head = layout.block_tokens * by_token
        by_layer = layout.kv_heads * by_head
        return numbers.as_strided(
            (run.count, layers.stop - layers.start, self._kv.num_heads, self._part_tokens, layout.head_dim),
            (run.step.at, by_layer, by_head, by_token, 1),
            run.first.at + layers.start * by_layer + heads.start * by_head + half * layout.head_dim,
        )


def page_copier(tensors: Sequence[torch.Tensor], layout: KvLayout, *, first_head: int = 0) -> PageCopier:
    """For tensors as vLLM has them: on the CPU with K transposed, on a GPU in rows.

    Raises `ConfigError` when the tensors cannot be those of such blocks or Triton is missing, and `TierUnavailable`
    when torch's CUDA runtime cannot be found.
    """
    if tensors[0].device.type == "cpu":
        return HostPageCopier(tensors, layout, first_head=first_head)
    # Not above: it needs Triton, which machines without a GPU may lack.
    try:
        module = importlib.import_module("kvtier.transfer.copiers.cuda_page_copier")
    except ModuleNotFoundError as error:
        raise ConfigError(f"pages on a GPU need {error.name}: pip install {error.name}") from error
    return cast(PageCopier, module.CudaPageCopier(tensors, layout, first_head=first_head))


def check_places(
    layout: KvLayout,
    num_pages: int,
    page_tokens: int,
    pages: Sequence[int],
    blocks: Sequence[int],
    arena: MappedArena,
    offsets: Sequence[int],
) -> None:
    """Our own callers know what lies where: a copy that left its pages or the arena would ruin somebody's memory."""
    assert len(blocks) == len(offsets)
    if blocks:
        assert 0 <= min(pages) <= max(pages) < num_pages, "no such page"
        assert min(blocks) >= 0, "no such block"
        assert (max(blocks) + 1) * layout.block_tokens <= len(pages) * page_tokens, "the pages end before the blocks"
        assert 0 <= min(offsets) <= max(offsets) <= arena.nbytes - layout.block_bytes, "outside the arena"
        assert not any(offset % layout.itemsize for offset in offsets), "numbers begin at multiples of their size"


@dataclass(frozen=True, slots=True)
class _Part:
    """What lies in one page of one block: from token `inside` of `page` on, and from number `at` of the arena."""

    page: int
    inside: int
    at: int

    def __sub__(self, other: _Part) -> _Part:
        return _Part(self.page - other.page, self.inside - other.inside, self.at - other.at)

    @property
    def is_step(self) -> bool:
        """Parts may follow each other at this distance in one view: torch has no negative strides."""
        return self.page >= 0 and self.inside >= 0 and self.at > 0


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` parts, each `step` after the one before it."""

    first: _Part
    step: _Part
    count: int


_NOWHERE = _Part(0, 0, 0)


def _runs(parts: Iterable[_Part], max_parts: int) -> Iterator[_Run]:
    """All parts, in as few runs of at most `max_parts` as a walk through them finds."""
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
    """The slots at `offsets` as (offset, size) of ranges, one for each row of them that lie side by side."""
    start = end = 0
    for offset in sorted(offsets):
        if offset != end and end > start:
            yield start, end - start
        start = start if offset == end and end > start else offset
        end = min(offset + slot_bytes, arena_bytes)
    if end > start:
        yield start, end - start
