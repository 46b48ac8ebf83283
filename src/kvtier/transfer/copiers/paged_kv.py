"""Blocks in kvtier's order from and to the pages of another engine, whatever their size and order. Needs torch.

A page is that engine's unit: the KV of `page_tokens` tokens of one layer. A block may be part of a page, or span some.
The engine's heads may be some of the block's: a tensor-parallel rank reads and writes only its own, so what ranks of
one engine have written together is one block that an engine with another number of ranks reads.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.memory.copying import Buffer


class PageOrder(enum.Enum):
    """How a page lies in memory, for each of its heads.

    ROWS: a row of K and then V for each token. TRANSPOSED_K: all of K with its dimensions as rows, then all of V with
    its tokens as rows, as vLLM's attention on CPUs wants it.
    """

    ROWS = enum.auto()
    TRANSPOSED_K = enum.auto()


class PagedKv:
    """The KV tensors of an engine, one for each layer: `(pages, heads, page_tokens, 2 * head_dim)`, of any strides.

    One thread at a time for a page; who calls knows that the engine does not write it meanwhile.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], layout: KvLayout, order: PageOrder, *, first_head: int = 0
    ) -> None:
        """`layout` is that of whole blocks, of which the tensors hold the heads from `first_head` on.

        Raises `ConfigError` when the tensors cannot be those of such blocks.
        """
        _check(tensors, layout, order, first_head)
        self.layout = layout
        self.num_pages, self.num_heads, self.page_tokens, _ = tensors[0].shape
        self.heads = slice(first_head, first_head + self.num_heads)
        self.dtype = tensors[0].dtype
        keys, values = zip(*(_halves(tensor, order, layout.head_dim) for tensor in tensors), strict=True)
        self.keys, self.values = _stacked(keys), _stacked(values)

    @property
    def is_whole(self) -> bool:
        """Its heads are all that a block has."""
        return bool(self.num_heads == self.layout.kv_heads)

    def read(self, pages: Sequence[int], first_token: int, blocks: Sequence[Buffer]) -> None:
        """Fill `blocks` with the tokens of a sequence from `first_token` on, whose pages, from its start, are `pages`.

        Of heads that the tensors do not have, the blocks keep what they hold.
        """
        for block, page, inside, place in self._parts(pages, first_token, blocks):
            for target, source in zip(self._halves_of(block), (self.keys, self.values), strict=True):
                for layers, tensor in source:
                    target[layers, :, place].copy_(tensor[:, page, :, inside])

    def write(self, pages: Sequence[int], first_token: int, blocks: Sequence[Buffer]) -> None:
        """The other way round: the tokens in `blocks` go into the pages."""
        for block, page, inside, place in self._parts(pages, first_token, blocks):
            for source, target in zip(self._halves_of(block), (self.keys, self.values), strict=True):
                for layers, tensor in target:
                    tensor[:, page, :, inside].copy_(source[layers, :, place])

    def _parts(
        self, pages: Sequence[int], first_token: int, blocks: Sequence[Buffer]
    ) -> Iterator[tuple[torch.Tensor, int, slice, slice]]:
        """What lies in one page: the block, the page, the tokens of the page, and the same tokens of the block."""
        block_tokens, page_tokens = self.layout.block_tokens, self.page_tokens
        assert first_token % block_tokens == 0, "a block begins at a multiple of its tokens"
        assert (first_token + len(blocks) * block_tokens) <= len(pages) * page_tokens, "the pages end before the blocks"
        for number, buffer in enumerate(blocks):
            block = self._as_tensor(buffer)
            token, end = first_token + number * block_tokens, first_token + (number + 1) * block_tokens
            while token < end:
                inside = token % page_tokens
                count = min(page_tokens - inside, end - token)
                place = token % block_tokens
                yield block, pages[token // page_tokens], slice(inside, inside + count), slice(place, place + count)
                token += count

    def _as_tensor(self, buffer: Buffer) -> torch.Tensor:
        """`(layers, heads, tokens, 2, head_dim)` over the block's own bytes, of our heads."""
        layout = self.layout
        assert memoryview(buffer).nbytes == layout.block_bytes, "a buffer of another size"
        flat = torch.frombuffer(buffer, dtype=self.dtype)
        shape = (layout.layers, layout.kv_heads, layout.block_tokens, 2, layout.head_dim)
        return flat.view(shape)[:, self.heads]

    def _halves_of(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return block[:, :, :, 0], block[:, :, :, 1]


Stack = list[tuple[slice, torch.Tensor]]
"""Tensors `(layers, pages, heads, tokens, head_dim)`, each with the layers it holds."""


def _halves(tensor: torch.Tensor, order: PageOrder, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as `(pages, heads, tokens, head_dim)`, views of the engine's memory."""
    if order is PageOrder.ROWS:
        return tensor[..., :head_dim], tensor[..., head_dim:]
    pages, heads, tokens, _ = tensor.shape
    flat = tensor.view(pages, heads, 2, tokens * head_dim)
    keys = flat[:, :, 0].view(pages, heads, head_dim, tokens).transpose(2, 3)
    return keys, flat[:, :, 1].view(pages, heads, tokens, head_dim)


def _stacked(layers: Sequence[torch.Tensor]) -> Stack:
    """All layers as one tensor where they lie evenly spaced in one storage: a copy of a block is then one call."""
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
