"""Where blocks lie in a device's KV memory: one description for our own arena and for the pages of other engines.

A page is an engine's unit: the KV of `page_tokens` tokens of one layer. A block may be part of a page, or span several;
the section of a block in one page is a part of the block, and has a place (see `transfer/places`). An arena consists of
pages of one block each, whose layers lie side by side: a block is one run of bytes.

The engine may have only some of a block's heads: a tensor-parallel rank reads and writes only its own. So the ranks of
an engine together write whole blocks, which an engine with another number of ranks can read.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.memory.mapped import MappedArena

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types by element size. Elements are copied as integers, since torch cannot copy some types otherwise."""


class PageOrder(enum.Enum):
    """How a page lies in memory, for each of its heads.

    ROWS: a row of K and then V for each token. TRANSPOSED_K: all of K with its dimensions as rows, then all of V with
    its tokens as rows, as vLLM's attention on CPUs expects it.
    """

    ROWS = enum.auto()
    TRANSPOSED_K = enum.auto()


@dataclass(frozen=True, slots=True)
class ByteRun:
    """`nbytes` that are contiguous on the device and in the block.

    They begin `device_bytes` after the start of a block's part in the first layer, and `block_bytes` after the start of
    that part in the block. In opaque pages, `device_bytes` is the address in page 0, and each next page is
    `stride_bytes` further.
    """

    device_bytes: int
    block_bytes: int
    nbytes: int
    stride_bytes: int = 0


class Pages(Protocol):
    """Blocks in KV memory, as far as copying runs of bytes needs it."""

    layout: KvLayout
    parts_per_block: int

    @property
    def device(self) -> torch.device: ...

    @property
    def is_whole(self) -> bool:
        """Whether the pages have all heads of a block."""
        ...

    @property
    def can_run(self) -> bool:
        """Whether the places of parts determine where all of their runs lie."""
        ...

    @property
    def plain_runs(self) -> list[ByteRun] | None:
        """The runs of a block, if a host can copy it as it is; None if its numbers lie in another order."""
        ...

    def runs(self, layers: range) -> list[ByteRun]: ...

    def run_addresses(self, places: Sequence[int], run: ByteRun) -> list[int]: ...

    def run_offsets(self, offsets: Sequence[int], run: ByteRun) -> list[int]: ...

    def check(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int]) -> None: ...


Stack = list[tuple[slice, torch.Tensor]]
"""Tensors `(layers, pages, heads, tokens, head_dim)`, each with the layers it holds."""


class Geometry:
    """The KV tensors of an engine, one for each layer: `(pages, heads, page_tokens, 2 * head_dim)`, of any strides."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: KvLayout,
        order: PageOrder = PageOrder.ROWS,
        *,
        first_head: int = 0,
    ) -> None:
        """`layout` is that of whole blocks. The tensors hold the heads from `first_head` on.

        Raises `ConfigError` if the tensors cannot be those of such blocks.
        """
        _check(tensors, layout, order, first_head)
        self.tensors = tensors  # keeps the memory alive
        self.layout = layout
        self.order = order
        self.first_head = first_head
        self.num_pages, self.num_heads, self.page_tokens, _ = tensors[0].shape
        self.part_tokens = min(self.page_tokens, layout.block_tokens)
        self.parts_per_page = self.page_tokens // self.part_tokens
        self.parts_per_block = layout.block_tokens // self.part_tokens
        self.address: int = tensors[0].data_ptr()
        self._page_bytes = tensors[0].stride(0) * layout.itemsize
        self._part_bytes = tensors[0].stride(2) * layout.itemsize * self.part_tokens
        self.is_one_run = self.can_run and self.runs(range(layout.layers)) == [ByteRun(0, 0, layout.block_bytes)]
        """A block lies as on the host: one run of bytes."""

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def is_whole(self) -> bool:
        """Whether its heads are all heads of a block."""
        return bool(self.num_heads == self.layout.kv_heads)

    @property
    def can_run(self) -> bool:
        """Whether the places of parts determine where all their layers lie, in rows."""
        first = self.tensors[0]
        return self.order is PageOrder.ROWS and all(tensor.stride() == first.stride() for tensor in self.tensors)

    @property
    def plain_runs(self) -> list[ByteRun] | None:
        return [ByteRun(0, 0, self.layout.block_bytes)] if self.is_one_run else None

    def runs(self, layers: range) -> list[ByteRun]:
        """A part's runs in `layers`, in the order of the block. Requires `can_run`."""
        layout, first = self.layout, self.tensors[0]
        _, head_stride, token_stride, dim_stride = first.stride()
        if dim_stride != 1:
            return [ByteRun(0, 0, layout.itemsize)]
        row_bytes = 2 * layout.head_dim * layout.itemsize
        runs: list[ByteRun] = []
        for layer, head, token in itertools.product(layers, range(self.num_heads), range(self.part_tokens)):
            inside = (head * head_stride + token * token_stride) * layout.itemsize
            device = self.tensors[layer].data_ptr() - self.address + inside
            row = (layer * layout.kv_heads + self.first_head + head) * layout.block_tokens + token
            last = runs[-1] if runs else None
            if last and (device, row * row_bytes) == (last.device_bytes + last.nbytes, last.block_bytes + last.nbytes):
                runs[-1] = ByteRun(last.device_bytes, last.block_bytes, last.nbytes + row_bytes)
            else:
                runs.append(ByteRun(device, row * row_bytes, row_bytes))
        return runs

    def halves(self) -> tuple[Stack, Stack]:
        """K and V, as views of the engine's memory."""
        halves = (_halves(tensor, self.order, self.layout.head_dim) for tensor in self.tensors)
        keys, values = zip(*halves, strict=True)
        return _stacked(keys), _stacked(values)

    def check(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int]) -> None:
        """Assert that a copy stays within its pages and the arena: a mistake of ours would corrupt other memory."""
        assert len(places) == len(offsets) * self.parts_per_block
        if places:
            assert 0 <= min(places) <= max(places) < self.num_pages * self.parts_per_page, "no such page"
            assert 0 <= min(offsets) <= max(offsets) <= arena.nbytes - self.layout.block_bytes, "outside the arena"

    def addresses(self, places: Sequence[int], first_byte: int = 0) -> list[int]:
        """The address of `first_byte` after each part's start in the first layer. Requires `can_run`."""
        start, page_bytes, parts = self.address + first_byte, self._page_bytes, self.parts_per_page
        if parts == 1:
            return [start + place * page_bytes for place in places]
        part_bytes = self._part_bytes
        return [start + place // parts * page_bytes + place % parts * part_bytes for place in places]

    def run_addresses(self, places: Sequence[int], run: ByteRun) -> list[int]:
        """Where each part has this run. Requires `can_run`."""
        return self.addresses(places, run.device_bytes)

    def run_offsets(self, offsets: Sequence[int], run: ByteRun) -> list[int]:
        """Where each part of the blocks at `offsets` has this run."""
        return self.part_offsets(offsets, run.block_bytes)

    def part_offsets(self, offsets: Sequence[int], first_byte: int = 0) -> list[int]:
        """The offset of `first_byte` after each part's start in the blocks at `offsets`."""
        if self.parts_per_block == 1:
            return [offset + first_byte for offset in offsets]
        part_bytes = self.part_tokens * 2 * self.layout.head_dim * self.layout.itemsize
        starts = range(first_byte, first_byte + self.parts_per_block * part_bytes, part_bytes)
        return [offset + start for offset in offsets for start in starts]


def _halves(tensor: torch.Tensor, order: PageOrder, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as `(pages, heads, tokens, head_dim)`, views of the engine's memory."""
    if order is PageOrder.ROWS:
        return tensor[..., :head_dim], tensor[..., head_dim:]
    pages, heads, tokens, _ = tensor.shape
    flat = tensor.view(pages, heads, 2, tokens * head_dim)
    keys = flat[:, :, 0].view(pages, heads, head_dim, tokens).transpose(2, 3)
    return keys, flat[:, :, 1].view(pages, heads, tokens, head_dim)


def _stacked(layers: Sequence[torch.Tensor]) -> Stack:
    """All layers as one tensor if they are evenly spaced in one storage: then copying a block is one call."""
    first = layers[0]
    step = layers[1].storage_offset() - first.storage_offset() if len(layers) > 1 else 0
    is_even = step >= 0 and all(
        layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and layer.stride() == first.stride()
        and layer.storage_offset() == first.storage_offset() + number * step
        for number, layer in enumerate(layers)
    )
    if is_even:
        shape, strides = (len(layers), *first.shape), (step, *first.stride())
        return [(slice(0, len(layers)), first.as_strided(shape, strides, first.storage_offset()))]
    return [(slice(number, number + 1), layer.unsqueeze(0)) for number, layer in enumerate(layers)]


def _check(tensors: Sequence[torch.Tensor], layout: KvLayout, order: PageOrder, first_head: int) -> None:
    if len(tensors) != layout.layers:
        raise ConfigError(f"there are KV tensors for {len(tensors)} layers, but blocks have {layout.layers}")
    shape, dtype = tensors[0].shape, getattr(torch, layout.dtype)
    for tensor in tensors:
        if tensor.ndim != 4 or tensor.shape != shape or tensor.shape[3] != 2 * layout.head_dim:
            raise ConfigError(
                f"a KV tensor has the shape {list(tensor.shape)}, not (pages, heads, tokens, {2 * layout.head_dim})"
            )
        if tensor.dtype != dtype:
            raise ConfigError(f"a KV tensor holds {tensor.dtype}, but blocks hold {layout.dtype}")
        if order is PageOrder.TRANSPOSED_K and not tensor[0, 0].is_contiguous():
            raise ConfigError("pages with K transposed must hold each head as one run of bytes")
    if not 0 <= first_head <= first_head + shape[1] <= layout.kv_heads:
        raise ConfigError(
            f"heads {first_head} to {first_head + shape[1]} are not among the {layout.kv_heads} of a block"
        )
    page_tokens, block_tokens = shape[2], layout.block_tokens
    if page_tokens % block_tokens and block_tokens % page_tokens:
        raise ConfigError(
            f"pages of {page_tokens} tokens and blocks of {block_tokens}: one must be a multiple of the other"
        )
