"""Where the opaque pages of another engine lie: runs of bytes at a fixed distance from page to page.

A block is one page of all layers, its runs one after another. Groups of layers may share memory: a page belongs to one
group at a time, so its bytes are the same runs for all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers.geometry import ByteRun

_MAX_RUNS = 4096
"""With more runs than this, copies would go row by row: the engine should lay out its pages in another order."""


@dataclass(frozen=True, slots=True, order=True)
class PageRun:
    """`nbytes` of each page: for page 0 at `address`, for each next page `stride_bytes` further."""

    stride_bytes: int
    address: int
    nbytes: int


def page_runs(tensors: Iterable[torch.Tensor], num_pages: int) -> list[PageRun]:
    """All bytes that `tensors` have of a page, in memory order, each once.

    The first dimension counts pages, or equal parts of them. Raises `ConfigError` if that is not so, or if a page is in
    too many pieces.
    """
    merged = merged_runs({run for tensor in tensors for run in _runs_of(tensor, num_pages)})
    if len(merged) > _MAX_RUNS:
        raise ConfigError(f"a page lies in {len(merged)} pieces, and at most {_MAX_RUNS} are copied")
    return merged


def merged_runs(runs: Iterable[PageRun]) -> list[PageRun]:
    """The runs in memory order, each byte once. Raises `ConfigError` if pages overlap."""
    merged: list[PageRun] = []
    for run in sorted(runs):
        last = merged[-1] if merged else None
        if last is not None and last.stride_bytes == run.stride_bytes and run.address <= last.address + last.nbytes:
            end = max(last.address + last.nbytes, run.address + run.nbytes)
            merged[-1] = PageRun(last.stride_bytes, last.address, end - last.address)
        else:
            merged.append(run)
    for run in merged:
        if run.nbytes > run.stride_bytes:
            raise ConfigError("the KV tensors of layers lie across each other's pages")
    return merged


def _runs_of(tensor: torch.Tensor, num_pages: int) -> list[PageRun]:
    """One tensor's runs of each page."""
    if not tensor.ndim or tensor.shape[0] % num_pages or not tensor.numel():
        raise ConfigError(f"a KV tensor has the shape {list(tensor.shape)}, but there are {num_pages} pages")
    itemsize = tensor.element_size()
    parts = tensor.shape[0] // num_pages
    stride_bytes = parts * tensor.stride(0) * itemsize
    dims = [(parts, tensor.stride(0)), *zip(tensor.shape[1:], tensor.stride()[1:], strict=True)]
    inner = 1
    outer: list[range] = []
    for size, stride in sorted(((size, stride) for size, stride in dims if size > 1), key=lambda dim: dim[1]):
        if stride == inner and not outer:
            inner *= size
        else:
            outer.append(range(0, size * stride, stride))
    if math.prod(map(len, outer)) > _MAX_RUNS:
        raise ConfigError(f"a page of a layer lies in more than {_MAX_RUNS} pieces")
    address = tensor.data_ptr()
    return [
        PageRun(stride_bytes, address + sum(offsets) * itemsize, inner * itemsize)
        for offsets in itertools.product(*outer)
    ]


class OpaquePages:
    """The pages of one rank of an engine: part `part` of each block. A block's place is its page."""

    parts_per_block = 1

    def __init__(
        self, tensors: Sequence[torch.Tensor], num_pages: int, layout: KvLayout, *, part: int = 0, num_parts: int = 1
    ) -> None:
        """Raises `ConfigError` if the tensors cannot be those of such blocks."""
        self.tensors = tensors  # keeps the memory alive
        self.layout = layout
        self._num_pages = num_pages
        self._num_parts = num_parts
        self._page_runs = page_runs(tensors, num_pages)
        self._starts = list(itertools.accumulate((run.nbytes for run in self._page_runs), initial=0))
        page_bytes = self._starts[-1]
        if page_bytes * num_parts != layout.block_bytes:
            raise ConfigError(
                f"a page has {page_bytes} bytes in each of {num_parts} ranks, but blocks have {layout.block_bytes}"
            )
        self._first_byte = part * page_bytes

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def is_whole(self) -> bool:
        return self._num_parts == 1

    @property
    def can_run(self) -> bool:
        return True

    @property
    def plain_runs(self) -> list[ByteRun]:
        return self.runs(range(1))

    def runs(self, layers: range) -> list[ByteRun]:
        """All runs: such a block has one layer."""
        return [
            ByteRun(run.address, self._first_byte + start, run.nbytes, run.stride_bytes)
            for run, start in zip(self._page_runs, self._starts, strict=False)
        ]

    def run_addresses(self, places: Sequence[int], run: ByteRun) -> list[int]:
        return [run.device_bytes + place * run.stride_bytes for place in places]

    def run_offsets(self, offsets: Sequence[int], run: ByteRun) -> list[int]:
        return [offset + run.block_bytes for offset in offsets]

    def check(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int]) -> None:
        assert len(places) == len(offsets)
        if places:
            assert 0 <= min(places) <= max(places) < self._num_pages, "no such page"
            assert 0 <= min(offsets) <= max(offsets) <= arena.nbytes - self.layout.block_bytes, "outside the arena"
