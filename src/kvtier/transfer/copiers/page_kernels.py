"""Gathers blocks from an engine's pages on a GPU, and scatters them again.

The other side is *staging*: blocks side by side in the block format, with the heads that the pages have.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtier.transfer.copiers.geometry import INTEGERS, Geometry

_TILE_TOKENS = 16
_NUM_WARPS = 4
_MAX_UNIT = 16
"""Two-byte numbers that begin at multiples of this are read with a GPU's widest loads."""


class PageMoves:
    """The kernels for one engine's tensors. Calls never wait, and run in the order of the current stream."""

    def __init__(self, geometry: Geometry) -> None:
        """Requires `can_run` of `geometry`."""
        layout = geometry.layout
        self._geometry = geometry
        self._pages = geometry.tensors[0].view(INTEGERS[layout.itemsize])
        page_stride, _, token_stride, _ = self._pages.stride()
        layers = [(tensor.data_ptr() - geometry.address) // layout.itemsize for tensor in geometry.tensors]
        self._unit = math.gcd(_MAX_UNIT, page_stride, token_stride, *layers)
        self._layers = torch.tensor([layer // self._unit for layer in layers], device=geometry.device)
        self._block_shape = (layout.layers, geometry.num_heads, layout.block_tokens, 2 * layout.head_dim)

    def new_staging(self, num_blocks: int) -> torch.Tensor:
        return torch.empty((num_blocks, *self._block_shape), dtype=self._pages.dtype, device=self._pages.device)

    def table(self, places: Sequence[int]) -> torch.Tensor:
        """Where the parts lie, for the kernels, in the order of the current stream."""
        unit_bytes = self._unit * self._pages.itemsize
        distances = self._geometry.addresses(places, -self._geometry.address)
        table = torch.tensor(
            [distance // unit_bytes for distance in distances], dtype=torch.int64, pin_memory=self._pages.is_cuda
        )
        return table.to(self._pages.device, non_blocking=True)

    def gather(self, table: torch.Tensor, staging: torch.Tensor) -> None:
        """Fill the blocks of the dense `staging`, one for each in `table`, from the pages."""
        self._move(table, staging, is_scatter=False)

    def scatter(self, table: torch.Tensor, staging: torch.Tensor) -> None:
        """The reverse of `gather`."""
        self._move(table, staging, is_scatter=True)

    def _move(self, table: torch.Tensor, staging: torch.Tensor, *, is_scatter: bool) -> None:
        num_layers, num_heads, block_tokens, width = self._block_shape
        num_blocks = table.numel() // self._geometry.parts_per_block
        assert staging.is_contiguous()
        assert staging.numel() >= num_blocks * math.prod(self._block_shape)
        if num_blocks == 0:
            return
        _, head_stride, token_stride, dim_stride = self._pages.stride()
        tile_tokens = min(_TILE_TOKENS, triton.next_power_of_2(block_tokens))
        grid = (num_layers * num_heads, num_blocks, triton.cdiv(block_tokens, tile_tokens))
        _move_kernel[grid](
            self._pages,
            staging,
            self._layers,
            table,
            head_stride,
            token_stride,
            dim_stride,
            LAYERS=num_layers,
            HEADS=num_heads,
            TOKENS=block_tokens,
            PART_TOKENS=self._geometry.part_tokens,
            WIDTH=width,
            TILE_TOKENS=tile_tokens,
            TILE_WIDTH=triton.next_power_of_2(width),
            UNIT=self._unit,
            IS_SCATTER=is_scatter,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # newer Tritons warn if it is left to them
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
    """One program per tile of tokens, head, layer and block. Every address is computed in 64 bits."""
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
