"""Products of a few tokens with weights in 16 bits and few outputs: each weight is read once, in one kernel.

The twin is `torch.nn.functional.linear`, up to the order of sums. Libraries split such a product and add up the parts
in a second kernel; here the program that ends last does, and weights are on their way while the kernel before ends.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels import dependent_launch, tuning
from kvtier.kernels.operands import operand, shared_bytes_of
from kvtier.kernels.split_product import joined, make_counters, make_parts

__all__ = ["linear", "make_counters"]


def linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    *,
    tile: tuning.ProductTile | None = None,
) -> torch.Tensor | None:
    """`hidden` (T, K) times `weight` (N, K); None for more than a few tokens, for many outputs, and for other dtypes.

    By default, `tuning` chooses `tile`.
    """
    num_tokens, inputs = hidden.shape
    outputs = weight.shape[0]
    if num_tokens > tuning.MAX_PLAIN_TOKENS or hidden.element_size() != 2 or weight.dtype != hidden.dtype:
        return None
    tokens = tuning.few_tokens(num_tokens)
    if tile is None:
        tile = tuning.plain_tile(inputs=inputs, outputs=outputs)
        if tile is None:
            return None
        stage_bytes = tile.step * hidden.element_size() * (tile.rows + tokens)
        tile = tile.fitted(stage_bytes=stage_bytes, shared_bytes=shared_bytes_of(hidden.device))
    out = torch.empty((num_tokens, outputs), dtype=hidden.dtype, device=hidden.device)
    if not num_tokens:
        return out
    assert hidden.stride(1) == 1 and weight.is_contiguous(), "rows must be dense"  # noqa: PT018
    num_tiles = triton.cdiv(outputs, tile.rows)
    assert num_tiles <= counters.shape[0], "the counters are those of another layer"
    _product_kernel[(num_tiles, tile.splits)](
        hidden,
        weight,
        weight if bias is None else bias,
        out,
        make_parts(num_tiles=num_tiles, splits=tile.splits, rows=tile.rows, tokens=tokens, device=hidden.device),
        counters,
        num_tokens,
        hidden.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        HAS_BIAS=bias is not None,
        SPLITS=tile.splits,
        TOKENS=tokens,
        ROWS=tile.rows,
        STEP=tile.step,
        OPERAND=operand(hidden.dtype),
        **dependent_launch.launch_options(hidden.device, is_wanted=tile.dependent_launch),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    num_tokens,
    hidden_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OPERAND: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Some outputs of all tokens, over some of the inputs."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(columns, OUTPUTS - 1)
    tokens = tl.arange(0, TOKENS)
    inputs = tl.arange(0, STEP)
    is_token = (tokens < num_tokens)[:, None]
    SHARE: tl.constexpr = (INPUTS + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    begin = split * SHARE
    dependent_launch.let_next_start(DEPENDENT_LAUNCH)
    dependent_launch.wait(DEPENDENT_LAUNCH)
    hidden_ptrs = hidden_ptr + (tokens * hidden_stride)[:, None] + inputs[None, :]
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    part = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + SHARE, INPUTS), STEP):
        if INPUTS % STEP == 0:
            weight = tl.load(weight_ptrs + start)
            hidden = tl.load(hidden_ptrs + start, mask=is_token, other=0.0)
        else:
            is_input = (start + inputs < INPUTS)[None, :]
            weight = tl.load(weight_ptrs + start, mask=is_input, other=0.0)
            hidden = tl.load(hidden_ptrs + start, mask=is_token & is_input, other=0.0)
        part = tl.dot(weight.to(OPERAND), hidden.to(OPERAND).T, part)
    total, num_joined = joined(part, parts_ptr, counters_ptr, num_tokens, tile, split, SPLITS, ROWS, TOKENS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    is_written = (columns < OUTPUTS)[:, None] & (tokens < num_joined)[None, :]
    tl.store(
        out_ptr + (tokens * OUTPUTS)[None, :] + columns[:, None], total.to(out_ptr.dtype.element_ty), mask=is_written
    )
