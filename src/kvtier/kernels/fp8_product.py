"""Products of a few tokens with weights in 8-bit floats: each weight is read once, at the speed of the memory.

The twins are `fp8.quantize_rows` and `fp8.scaled_matmul`, up to the order of sums. The weights are the rows of the
matrix product and the tokens its columns, for tensor cores multiply 64 rows at a time and there are fewer tokens.
Inputs come in 8 bits, or are rounded to them on the way. Their scale needs the largest number of a row: then every
program finds it for itself, in the row or in what the kernel before has noted of it, which is less work than a kernel
in between.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels import dependent_launch, elementwise, tuning
from kvtier.kernels.operands import shared_bytes_of
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.kernels.split_product import joined, make_counters, make_parts

__all__ = ["linear", "linear_silu_mul", "make_counters"]

_EXACT_INPUTS = tl.constexpr(128)
"""Tensor cores accumulate products of 8-bit floats in fewer than 32 bits; after this many, the sum is added in 32."""


def linear(
    hidden: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    *,
    max_value: float,
    min_scale: float,
    peaks: torch.Tensor | None = None,
    tile: tuning.ProductTile | None = None,
) -> torch.Tensor | None:
    """`hidden` (T, K), quantised by row, times `weight` (N, K) with `scales` (N, 1); None for more than a few tokens.

    `peaks` (T, P), if known: the largest number of each row of `hidden` is the largest of its row here.
    By default, `tuning` chooses `tile`.
    """
    if not _takes(hidden):
        return None
    if peaks is None:
        hidden = _quantized_if_large(hidden, max_value, min_scale)
    tile = _tile(hidden, weight) if tile is None else tile
    out = torch.empty((hidden.shape[0], weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
    _launch(hidden, weight, scales, bias, counters, peaks, out, None, max_value, min_scale, tile)
    return out


def linear_silu_mul(
    hidden: torch.Tensor | QuantizedRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    *,
    max_value: float,
    min_scale: float,
    tile: tuning.ProductTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`operations.silu_mul` of `linear`'s product, and its `peaks`; None for more than a few tokens."""
    if not _takes(hidden):
        return None
    hidden = _quantized_if_large(hidden, max_value, min_scale)
    tile = _tile(hidden, weight) if tile is None else tile
    num_tokens, size = hidden.shape[0], weight.shape[0] // 2
    gated = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    peaks = torch.empty((num_tokens, triton.cdiv(size, tile.rows // 2)), dtype=torch.float32, device=hidden.device)
    _launch(hidden, weight, scales, bias, counters, None, gated, peaks, max_value, min_scale, tile)
    return gated, peaks


def _takes(hidden: torch.Tensor | QuantizedRows) -> bool:
    num_tokens: int = hidden.shape[0]
    return num_tokens <= tuning.MAX_FEW_TOKENS and hidden.dtype in (torch.float16, torch.bfloat16)


def _quantized_if_large(
    hidden: torch.Tensor | QuantizedRows, max_value: float, min_scale: float
) -> torch.Tensor | QuantizedRows:
    """`hidden`, quantised first if finding the row maxima in every program would be more work."""
    if isinstance(hidden, QuantizedRows) or hidden.numel() <= tuning.MAX_OWN_PEAKS:
        return hidden
    values, scales = elementwise.quantize_rows(hidden, max_value=max_value, min_scale=min_scale)
    return QuantizedRows(values, scales, hidden.dtype)


def _tile(hidden: torch.Tensor | QuantizedRows, weight: torch.Tensor) -> tuning.ProductTile:
    num_tokens = hidden.shape[0]
    outputs, inputs = weight.shape
    input_bytes = 1 if isinstance(hidden, QuantizedRows) else hidden.element_size()
    tile = tuning.fp8_tile(num_tokens=num_tokens, inputs=inputs, outputs=outputs, input_bytes=input_bytes)
    stage_bytes = tile.step * (tile.rows + input_bytes * tuning.few_tokens(num_tokens))
    return tile.fitted(stage_bytes=stage_bytes, shared_bytes=shared_bytes_of(hidden.device))


def _launch(hidden, weight, scales, bias, counters, peaks, out, out_peaks, max_value, min_scale, tile) -> None:
    num_tokens, inputs = hidden.shape
    if not num_tokens:
        return
    is_gated = out_peaks is not None
    is_quantized = isinstance(hidden, QuantizedRows)
    if is_quantized:
        hidden, peaks = hidden.values, hidden.scales
    elif peaks is None:
        peaks = hidden
    assert hidden.stride(1) == 1 and weight.is_contiguous(), "rows must be dense"  # noqa: PT018
    outputs = out.shape[1]
    columns = tile.rows // 2 if is_gated else tile.rows
    tokens = tuning.few_tokens(num_tokens)
    num_tiles = triton.cdiv(outputs, columns)
    parts = make_parts(num_tiles=num_tiles, splits=tile.splits, rows=tile.rows, tokens=tokens, device=hidden.device)
    assert num_tiles <= counters.shape[0], "the counters are those of another layer"
    assert (tile.splits - 1) * triton.cdiv(inputs, tile.step * tile.splits) * tile.step < inputs, "a share is empty"
    peak_rows = tuning.peak_rows(num_tokens)
    _product_kernel[(num_tiles, tile.splits)](
        hidden,
        peaks,
        weight,
        scales,
        scales if bias is None else bias,
        out,
        parts if out_peaks is None else out_peaks,
        parts,
        counters,
        num_tokens,
        hidden.stride(0),
        peaks.stride(0),
        max_value,
        min_scale,
        INPUTS=inputs,
        OUTPUTS=outputs,
        PEAKS=peaks.shape[1],
        PEAK_ROWS=peak_rows,
        PEAK_COLUMNS=min(triton.next_power_of_2(peaks.shape[1]), tuning.PEAKS_AT_ONCE // peak_rows),
        IS_QUANTIZED=is_quantized,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        SPLITS=tile.splits,
        TOKENS=tokens,
        COPIED=tokens if is_quantized else tuning.copied_tokens(num_tokens),
        ROWS=tile.rows,
        STEP=tile.step,
        **dependent_launch.launch_options(hidden.device, is_wanted=tile.dependent_launch),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    hidden_ptr,
    peaks_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    out_peaks_ptr,
    parts_ptr,
    counters_ptr,
    num_tokens,
    hidden_stride,
    peaks_stride,
    max_value,
    min_scale,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAK_ROWS: tl.constexpr,
    PEAK_COLUMNS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    COPIED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Some outputs of all tokens, over some of the inputs. A gated tile is half of gate's outputs, half of up's."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    COLUMNS: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    columns = tile * COLUMNS + rows % COLUMNS
    weight_rows = tl.minimum(columns, OUTPUTS - 1) + rows // COLUMNS * OUTPUTS
    SHARE: tl.constexpr = (INPUTS + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    begin = split * SHARE
    dependent_launch.let_next_start(DEPENDENT_LAUNCH)
    dependent_launch.wait(DEPENDENT_LAUNCH)
    # Here, before they are needed: after the loop, every program would wait for memory once more.
    weight_scales = tl.load(scales_ptr + weight_rows)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_rows)
    if IS_QUANTIZED:
        token_scales = tl.load(peaks_ptr + tokens, mask=is_token, other=1.0)
    else:
        token_scales = tl.zeros((TOKENS,), dtype=tl.float32)
        inverses = tl.zeros((TOKENS,), dtype=tl.float32)

    inputs = tl.arange(0, STEP)
    copied = tl.arange(0, COPIED)
    is_copied = (copied < num_tokens)[:, None]
    hidden_ptrs = hidden_ptr + (copied * hidden_stride)[:, None] + inputs[None, :]
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    part = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + SHARE, INPUTS), STEP):
        if INPUTS % STEP == 0:
            weight = tl.load(weight_ptrs + start)
            hidden = tl.load(hidden_ptrs + start, mask=is_copied, other=0.0)
        else:
            is_input = (start + inputs < INPUTS)[None, :]
            weight = tl.load(weight_ptrs + start, mask=is_input, other=0.0)
            hidden = tl.load(hidden_ptrs + start, mask=is_copied & is_input, other=0.0)
        if not IS_QUANTIZED:
            if start == begin:  # not before the loop: here, weights of several steps are already in flight
                peaks = _row_peaks(peaks_ptr, peaks_stride, num_tokens, PEAKS, PEAK_ROWS, PEAK_COLUMNS, TOKENS)
                token_scales = tl.maximum(tl.div_rn(peaks, max_value), min_scale)
                inverses = tl.where(is_token, tl.div_rn(1.0, token_scales), 0.0)
            hidden = _repeated(hidden, COPIED, TOKENS, STEP).to(tl.float32) * inverses[:, None]
            hidden = hidden.to(weight_ptr.dtype.element_ty)
        part = tl.dot(weight, hidden.T, part, max_num_imprecise_acc=_EXACT_INPUTS)

    total, num_joined = joined(part, parts_ptr, counters_ptr, num_tokens, tile, split, SPLITS, ROWS, TOKENS)
    dtype = out_ptr.dtype.element_ty
    total = total * token_scales[None, :] * weight_scales[:, None]
    if HAS_BIAS:
        total += bias.to(tl.float32)[:, None]
    total = total.to(dtype)
    is_joined = tokens < num_joined
    if IS_GATED:
        wide = total.to(tl.float32)
        activated = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
        factors = tl.where((rows < COLUMNS)[:, None], activated, wide)
        total = tl.reduce(factors.reshape(2, COLUMNS, TOKENS), 0, _multiply).to(dtype)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_written = (columns < OUTPUTS)[:, None] & is_joined[None, :]
        peaks = tl.max(tl.where(is_written, tl.abs(total.to(tl.float32)), 0.0), 0)
        tl.store(out_peaks_ptr + tokens * tl.num_programs(0) + tile, peaks, mask=is_joined)
    else:
        is_written = (columns < OUTPUTS)[:, None] & is_joined[None, :]
    tl.store(out_ptr + (tokens * OUTPUTS)[None, :] + columns[:, None], total, mask=is_written)


@triton.jit
def _repeated(rows, COPIED: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """All rows, repeated until there are TOKENS of them."""
    return tl.broadcast_to(rows[None, :, :], (TOKENS // COPIED, COPIED, STEP)).reshape(TOKENS, STEP)


@triton.jit
def _multiply(first, second):
    return first * second


@triton.jit
def _row_peaks(
    peaks_ptr,
    peaks_stride,
    num_tokens,
    PEAKS: tl.constexpr,
    PEAK_ROWS: tl.constexpr,
    PEAK_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The largest absolute number of each of the first PEAK_ROWS rows; zeros for the other tokens."""
    rows = tl.arange(0, PEAK_ROWS)
    columns = tl.arange(0, PEAK_COLUMNS)
    largest = tl.zeros((PEAK_ROWS, PEAK_COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, PEAKS, PEAK_COLUMNS):
        is_peak = (rows < num_tokens)[:, None] & (start + columns < PEAKS)[None, :]
        numbers = tl.load(
            peaks_ptr + (rows * peaks_stride)[:, None] + start + columns[None, :], mask=is_peak, other=0.0
        )
        largest = tl.maximum(largest, tl.abs(numbers.to(tl.float32)))
    is_row = rows[:, None] == tl.arange(0, TOKENS)[None, :]
    return tl.max(tl.where(is_row, tl.max(largest, 1)[:, None], 0.0), 0)
