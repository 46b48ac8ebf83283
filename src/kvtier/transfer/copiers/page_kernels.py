"""Brings blocks together from an engine's pages on a GPU, and spreads them again. `PagedKv` is the twin.

The other side of a copy is *staging*: the blocks side by side in the block format, of the heads that the pages have.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_TILE_TOKENS = 16
_NUM_WARPS = 4
_MAX_UNIT = 16
"""Numbers of two bytes that begin at multiples of this are read as widely as a GPU can."""


class PageMoves:
    """The kernels for one engine's tensors, one for each layer: `(pages, heads, page_tokens, width)`, of any strides
    that are the same for all.

    Calls wait for nothing, and run in the order of the current stream.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], block_tokens: int) -> None:
        """`tensors` hold whole numbers."""
        first = tensors[0]
        self._first = first
        self.num_heads, self.page_tokens, self.width = first.shape[1:]
        self.num_layers = len(tensors)
        self.block_tokens = block_tokens
        self.part_tokens = min(block_tokens, self.page_tokens)
        self._page_stride, self._head_stride, self._token_stride, self._dim_stride = first.stride()
        layers = [(tensor.data_ptr() - first.data_ptr()) // first.itemsize for tensor in tensors]
        self._unit = math.gcd(_MAX_UNIT, self._page_stride, self._token_stride, *layers)
        self._layers = torch.tensor([layer // self._unit for layer in layers], device=first.device)
        self._tensors = tensors  # keeps the memory

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Of a block in staging."""
        return (self.num_layers, self.num_heads, self.block_tokens, self.width)

    def places(self, pages: Sequence[int], blocks: Sequence[int]) -> list[list[int]]:
        """Where the parts of each block of a sequence lie, whose pages, from its start, are `pages`; for the kernels.

        A part is what lies in one page.
        """
        page_step, token_step = self._page_stride // self._unit, self._token_stride // self._unit
        places = []
        for block in blocks:
            first = block * self.block_tokens
            tokens = range(first, first + self.block_tokens, self.part_tokens)
            places.append(
                [
                    pages[token // self.page_tokens] * page_step + token % self.page_tokens * token_step
                    for token in tokens
                ]
            )
        return places

    def address_of(self, place: int) -> int:
        """Of one of `places`, in the first layer and head."""
        address: int = self._first.data_ptr() + place * self._unit * self._first.itemsize
        return address

    def gather(self, places: torch.Tensor, staging: torch.Tensor) -> None:
        """Fill as many blocks of `staging`, which is dense, as `places` has, with what lies in the pages."""
        self._move(places, staging, is_scatter=False)

    def scatter(self, places: torch.Tensor, staging: torch.Tensor) -> None:
        """The other way round."""
        self._move(places, staging, is_scatter=True)

    def _move(self, places: torch.Tensor, staging: torch.Tensor, *, is_scatter: bool) -> None:
        num_blocks = places.shape[0]
        assert places.dtype is torch.int64
        assert places.is_contiguous()
        assert staging.is_contiguous()
        assert staging.numel() >= num_blocks * math.prod(self.block_shape)
        if num_blocks == 0:
            return
        tile_tokens = min(_TILE_TOKENS, triton.next_power_of_2(self.block_tokens))
        grid = (self.num_layers * self.num_heads, num_blocks, triton.cdiv(self.block_tokens, tile_tokens))
        _move_kernel[grid](
            self._first,
            staging,
            self._layers,
            places,
            self._head_stride,
            self._token_stride,
            self._dim_stride,
            LAYERS=self.num_layers,
            HEADS=self.num_heads,
            TOKENS=self.block_tokens,
            PART_TOKENS=self.part_tokens,
            WIDTH=self.width,
            TILE_TOKENS=tile_tokens,
            TILE_WIDTH=triton.next_power_of_2(self.width),
            UNIT=self._unit,
            IS_SCATTER=is_scatter,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # newer Tritons warn when it is left to them
        )


@triton.jit
def _move_kernel(
    pages_ptr,
    staging_ptr,
    layers_ptr,
    places_ptr,
    head_stride,
    token_stride,
    dim_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    IS_SCATTER: tl.constexpr,
):
    """One program per head of a layer of a block, and tile of its tokens. Every address is summed in 64 bits."""
    layer = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(2) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    dims = tl.arange(0, TILE_WIDTH)[None, :]
    is_kept = (tokens[:, None] < TOKENS) & (dims < WIDTH)
    places = places_ptr + block * (TOKENS // PART_TOKENS) + tokens // PART_TOKENS
    place = (tl.load(places, mask=tokens < TOKENS, other=0) + tl.load(layers_ptr + layer)) * UNIT
    inside = (tokens % PART_TOKENS).to(tl.int64) * token_stride
    in_pages = pages_ptr + (place + inside + head * head_stride)[:, None] + dims.to(tl.int64) * dim_stride
    first_row = ((block * LAYERS + layer) * HEADS + head) * TOKENS
    in_staging = staging_ptr + (first_row + tokens)[:, None] * WIDTH + dims
    if IS_SCATTER:
        tl.store(in_pages, tl.load(in_staging, mask=is_kept), mask=is_kept)
    else:
        tl.store(in_staging, tl.load(in_pages, mask=is_kept), mask=is_kept)
