"""Blocks from and to an engine's pages by a loop over blocks, in plain torch: the twin of copiers and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.memory.copying import Buffer
from kvtier.transfer.copiers.geometry import Geometry, PageOrder


class PagedKv:
    """The KV tensors of an engine, as `Geometry` takes them."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], layout: KvLayout, order: PageOrder, *, first_head: int = 0
    ) -> None:
        self._geometry = Geometry(tensors, layout, order, first_head=first_head)
        self._stacks = self._geometry.halves()

    def read(self, pages: Sequence[int], first_token: int, blocks: Sequence[Buffer]) -> None:
        """Fill `blocks` with the tokens of a sequence from `first_token` on, whose pages, from its start, are `pages`.

        Of heads that the tensors do not have, the blocks keep what they hold.
        """
        for block, page, inside, place in self._parts(pages, first_token, blocks):
            for half, stack in enumerate(self._stacks):
                for layers, tensor in stack:
                    block[layers, :, place, half].copy_(tensor[:, page, :, inside])

    def write(self, pages: Sequence[int], first_token: int, blocks: Sequence[Buffer]) -> None:
        """The other way round: the tokens in `blocks` go into the pages."""
        for block, page, inside, place in self._parts(pages, first_token, blocks):
            for half, stack in enumerate(self._stacks):
                for layers, tensor in stack:
                    tensor[:, page, :, inside].copy_(block[layers, :, place, half])

    def _parts(
        self, pages: Sequence[int], first_token: int, blocks: Sequence[Buffer]
    ) -> Iterator[tuple[torch.Tensor, int, slice, slice]]:
        """The content of one page: the block, the page, the tokens of the page, and the same tokens of the block."""
        block_tokens, page_tokens = self._geometry.layout.block_tokens, self._geometry.page_tokens
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
        geometry, layout = self._geometry, self._geometry.layout
        flat = torch.frombuffer(buffer, dtype=geometry.tensors[0].dtype)
        shape = (layout.layers, layout.kv_heads, layout.block_tokens, 2, layout.head_dim)
        return flat.view(shape)[:, geometry.first_head : geometry.first_head + geometry.num_heads]
