"""Products of a few tokens with weights in 4 bits, and all weights at once in 16 for the products of many.

The twin is `gptq.dequantize`: a weight is multiplied out in float32 and rounded to the inputs' dtype, then multiplied
as such. That happens in registers, so that memory is read at 4 bits a weight. `pack` puts a checkpoint's words into
the order in which this reads them: tile by tile in one piece, the eight numbers of a word 16 inputs apart, so that what
the same bits of 16 neighbouring words hold belongs to 16 neighbouring inputs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels import tuning
from kvtier.kernels.operands import operand, shared_bytes_of
from kvtier.kernels.split_product import joined, make_counters, make_parts

__all__ = ["can_pack", "dequantize", "linear", "make_counters", "pack"]

BLOCK_INPUTS = 128
"""Inputs per packed block."""

_PER_WORD = 8
_WORDS = BLOCK_INPUTS // _PER_WORD
_DEQUANTIZED_ROWS = 64


def can_pack(*, inputs: int, group_size: int) -> bool:
    """Whether there are kernels for a weight whose groups are runs of `group_size` of its `inputs`."""
    is_group_cut = group_size % BLOCK_INPUTS and BLOCK_INPUTS % group_size
    return inputs % BLOCK_INPUTS == 0 and group_size % _WORDS == 0 and not is_group_cut


def pack(qweight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The words of a checkpoint (K / 8, N) in this module's order: (K / 128, N, 16), as many as before.

    `order` (K,) lists the inputs so that those of a group are neighbours; the kernels take their inputs in this order,
    too.
    """
    order = order.view(-1, _PER_WORD, _WORDS)
    packed = torch.zeros((order.shape[0], _WORDS, qweight.shape[1]), dtype=torch.int32, device=qweight.device)
    for number in range(_PER_WORD):
        inputs = order[:, number]
        levels = (qweight[inputs // _PER_WORD] >> (inputs % _PER_WORD * 4).int()[:, :, None]) & 0xF
        packed |= levels << (4 * number)
    return packed.transpose(1, 2).contiguous()


def linear(
    hidden: torch.Tensor,
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    *,
    tile: tuning.ProductTile | None = None,
) -> torch.Tensor | None:
    """`hidden` (T, K) times the weight in `words` of `pack`; None for more than a few tokens.

    By default, `tuning` chooses `tile`.
    """
    num_tokens, inputs = hidden.shape
    if num_tokens > tuning.MAX_FEW_TOKENS or hidden.element_size() != 2:
        return None
    outputs = words.shape[1]
    out = torch.empty((num_tokens, outputs), dtype=hidden.dtype, device=hidden.device)
    if not num_tokens:
        return out
    assert hidden.stride(1) == 1 and words.is_contiguous(), "rows must be dense"  # noqa: PT018
    tokens = tuning.few_tokens(num_tokens)
    if tile is None:
        tile = tuning.int4_tile(inputs=inputs, outputs=outputs)
        stage_bytes = BLOCK_INPUTS * (tile.rows // 2 + hidden.element_size() * tokens)
        tile = tile.fitted(stage_bytes=stage_bytes, shared_bytes=shared_bytes_of(hidden.device))
    num_tiles = triton.cdiv(outputs, tile.rows)
    assert num_tiles <= counters.shape[0], "the counters are those of another layer"
    _product_kernel[(num_tiles, tile.splits)](
        hidden,
        words,
        zeros,
        scales.view(torch.int32),
        scales if bias is None else bias,
        out,
        make_parts(num_tiles=num_tiles, splits=tile.splits, rows=tile.rows, tokens=tokens, device=hidden.device),
        counters,
        num_tokens,
        hidden.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUP=inputs // scales.shape[0],
        HAS_BIAS=bias is not None,
        SPLITS=tile.splits,
        TOKENS=tokens,
        ROWS=tile.rows,
        OPERAND=operand(hidden.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )
    return out


def dequantize(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight (N, K) in `dtype`."""
    num_blocks, outputs, _ = words.shape
    inputs = num_blocks * BLOCK_INPUTS
    weight = torch.empty((outputs, inputs), dtype=dtype, device=words.device)
    _dequantize_kernel[(triton.cdiv(outputs, _DEQUANTIZED_ROWS), num_blocks)](
        words,
        zeros,
        scales.view(torch.int32),
        weight,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUP=inputs // scales.shape[0],
        ROWS=_DEQUANTIZED_ROWS,
        num_warps=4,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )
    return weight


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    hidden_ptr,
    words_ptr,
    zeros_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_tokens,
    hidden_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Some outputs of all tokens, over some of the inputs."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(columns, OUTPUTS - 1)
    tokens = tl.arange(0, TOKENS)
    places = tl.arange(0, 16)
    is_token = (tokens < num_tokens)[:, None]
    hidden_ptrs = hidden_ptr + (tokens * hidden_stride)[:, None] + places[None, :]
    words_ptrs = words_ptr + (rows * 16)[:, None] + places[None, :]
    dtype = out_ptr.dtype.element_ty
    part = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    BLOCKS: tl.constexpr = INPUTS // 128
    SHARE: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    begin = split * SHARE
    for block in range(begin, tl.minimum(begin + SHARE, BLOCKS)):
        words = tl.load(words_ptrs + block * (OUTPUTS * 16))
        for number in tl.static_range(8):
            if (number * 16) % GROUP == 0 or number == 0:
                group = (block * 128 + number * 16) // GROUP
                zeros, scales = _group(zeros_ptr, scales_ptr, group, rows, OUTPUTS)
            weight = _weights(words, number, zeros, scales).to(dtype).to(OPERAND)
            hidden = tl.load(hidden_ptrs + block * 128 + number * 16, mask=is_token, other=0.0).to(OPERAND)
            part = tl.dot(weight, hidden.T, part)
    total, num_joined = joined(part, parts_ptr, counters_ptr, num_tokens, tile, split, SPLITS, ROWS, TOKENS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    is_written = (columns < OUTPUTS)[:, None] & (tokens < num_joined)[None, :]
    tl.store(out_ptr + (tokens * OUTPUTS)[None, :] + columns[:, None], total.to(dtype), mask=is_written)


@triton.jit
def _dequantize_kernel(
    words_ptr,
    zeros_ptr,
    scales_ptr,
    weight_ptr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One block of inputs of some outputs."""
    columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    rows = tl.minimum(columns, OUTPUTS - 1)
    places = tl.arange(0, 16)
    words = tl.load(words_ptr + (block.to(tl.int64) * OUTPUTS + rows)[:, None] * 16 + places[None, :])
    weight_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * INPUTS + block * 128 + places[None, :]
    is_written = (columns < OUTPUTS)[:, None]
    for number in tl.static_range(8):
        if (number * 16) % GROUP == 0 or number == 0:
            group = (block * 128 + number * 16) // GROUP
            zeros, scales = _group(zeros_ptr, scales_ptr, group, rows, OUTPUTS)
        weight = _weights(words, number, zeros, scales)
        tl.store(weight_ptrs + number * 16, weight.to(weight_ptr.dtype.element_ty), mask=is_written)


@triton.jit
def _group(zeros_ptr, scales_ptr, group, rows, OUTPUTS: tl.constexpr):
    """Zero points, each 2**23 more than it is, and scales of one group, as float32.

    Two scales of 16 bits are read as a word, since only whole words are copied ahead of their use.
    """
    zeros = (tl.load(zeros_ptr + group * (OUTPUTS // 8) + rows // 8) >> (rows % 8 * 4)) & 0xF
    scales = tl.load(scales_ptr + group * (OUTPUTS // 2) + rows // 2) >> (rows % 2 * 16)
    return _above_2_to_23(zeros), scales.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _weights(words, number: tl.constexpr, zeros, scales):
    """The weights in the four bits `number` of each word, in float32."""
    return (_above_2_to_23((words >> (4 * number)) & 0xF) - zeros[:, None]) * scales[:, None]


@triton.jit
def _above_2_to_23(levels):
    """2**23 plus `levels`, as float32: these are its last bits. Faster than converting, and exact."""
    return (levels | 0x4B000000).to(tl.float32, bitcast=True)
