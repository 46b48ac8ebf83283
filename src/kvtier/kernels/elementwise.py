"""The operations between matrix products, each in one pass over memory. `models/fused_operations` has the twins.

All of them compute in float32 and round where the twins round. None waits for the device, and none is compiled anew
for another number of tokens.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.kernels import dependent_launch, tuning
from kvtier.kernels.operands import operand
from kvtier.kernels.quantized_rows import QuantizedRows

_GATE_COLUMNS = 2048
_FEW_TOKENS = 16
_FEW_COLUMNS = 32
_FEW_INPUTS = 128
_QUANTIZED_COLUMNS = 4096


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Like `operations.rms_norm`, for rows `(T, size)` that may lie apart."""
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _norm(hidden, None, weight, eps, normed, None)
    return normed


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `operations.add_rms_norm`."""
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    total = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _norm(hidden, residual, weight, eps, normed, total)
    return normed, total


def quantized_rms_norm(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    max_value: float,
    min_scale: float,
) -> tuple[QuantizedRows, torch.Tensor]:
    """`quantize_rows` of the result of `add_rms_norm`, bit for bit, and the sum (`hidden` without a residual)."""
    values, scales = _make_quantized(hidden)
    total = hidden if residual is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _norm(hidden, residual, weight, eps, values, total, scales, max_value, min_scale)
    return QuantizedRows(values, scales, hidden.dtype), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Like `operations.silu_mul`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "rows must be dense"
    gated = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _gate_kernel[(num_tokens, triton.cdiv(size, _GATE_COLUMNS))](
            gate_up,
            gated,
            gate_up.stride(0),
            SIZE=size,
            COLUMNS=_GATE_COLUMNS,
            **_dependent(gate_up.device),
            num_warps=8,
        )
    return gated


def linear_silu_mul(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Like `operations.linear_silu_mul`, for a few tokens; None for more, and for unsupported sizes."""
    num_tokens, inputs = hidden.shape
    size = weight.shape[0] // 2
    if num_tokens > _FEW_TOKENS or size % _FEW_COLUMNS or inputs % _FEW_INPUTS or hidden.element_size() != 2:
        return None
    assert hidden.stride(1) == 1 and weight.is_contiguous(), "rows must be dense"  # noqa: PT018
    gated = torch.empty((num_tokens, size), dtype=hidden.dtype, device=hidden.device)
    if num_tokens:
        _linear_gate_kernel[(size // _FEW_COLUMNS,)](
            hidden,
            weight,
            gated,
            num_tokens,
            hidden.stride(0),
            SIZE=size,
            INPUTS=inputs,
            TOKENS=_FEW_TOKENS,
            COLUMNS=_FEW_COLUMNS,
            STEP=_FEW_INPUTS,
            OPERAND=operand(hidden.dtype),
            **_dependent(hidden.device),
            num_warps=4,
            num_stages=4,
        )
    return gated


def quantize_rows(rows: torch.Tensor, *, max_value: float, min_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `fp8.quantize_rows`, except the last digit of a few numbers: it multiplies by the scale's inverse."""
    num_rows, size = rows.shape
    assert rows.stride(1) == 1, "rows must be dense"
    values, scales = _make_quantized(rows)
    if num_rows:
        columns = min(triton.next_power_of_2(size), _QUANTIZED_COLUMNS)
        _quantize_kernel[(num_rows,)](
            rows,
            values,
            scales,
            rows.stride(0),
            max_value,
            min_scale,
            SIZE=size,
            COLUMNS=columns,
            **_dependent(rows.device),
            num_warps=min(max(columns // 512, 1), 8),
        )
    return values, scales


def _make_quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for `rows` in 8 bits and for their scales."""
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    return values, torch.empty((rows.shape[0], 1), dtype=torch.float32, device=rows.device)


def _norm(hidden, residual, weight, eps, normed, total, scales=None, max_value=0.0, min_scale=0.0) -> None:
    """Fills `normed`, quantised if there are `scales`, and `total`, if there is a residual."""
    num_tokens, size = hidden.shape
    assert all(one is None or one.stride(1) == 1 for one in (hidden, residual)), "rows must be dense"
    if num_tokens:
        columns = triton.next_power_of_2(size)
        _norm_kernel[(num_tokens,)](
            hidden,
            hidden if residual is None else residual,
            weight,
            normed,
            hidden if total is None else total,
            weight if scales is None else scales,
            hidden.stride(0),
            hidden.stride(0) if residual is None else residual.stride(0),
            eps,
            max_value,
            min_scale,
            SIZE=size,
            COLUMNS=columns,
            HAS_RESIDUAL=residual is not None,
            IS_QUANTIZED=scales is not None,
            **_dependent(hidden.device),
            num_warps=min(max(columns // 512, 1), 16),
        )


def _dependent(device: torch.device) -> dict[str, bool]:
    return dependent_launch.launch_options(device, is_wanted=tuning.DEPENDENT_LAUNCHES)


@triton.jit
def _norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    scales_ptr,
    hidden_stride,
    residual_stride,
    eps,
    max_value,
    min_scale,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    dependent_launch.let_next_start(DEPENDENT_LAUNCH)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)  # no kernel writes it, and it comes from memory
    dependent_launch.wait(DEPENDENT_LAUNCH)
    dtype = hidden_ptr.dtype.element_ty
    hidden = tl.load(hidden_ptr + token * hidden_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * residual_stride + columns, mask=is_column, other=0.0)
        total = (hidden + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + token * SIZE + columns, total, mask=is_column)
        hidden = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / SIZE + eps)
    normed = (hidden * scale * weight.to(tl.float32)).to(dtype)
    if IS_QUANTIZED:
        wide = normed.to(tl.float32)
        row_scale = _row_scale(tl.max(tl.abs(wide), 0), max_value, min_scale)
        tl.store(scales_ptr + token, row_scale)
        normed = _in_eight_bits(wide, tl.div_rn(1.0, row_scale), max_value, normed_ptr.dtype.element_ty)
        # Written in pieces as they are read: longer ones would change each thread's share, and so the sum's order.
        columns = tl.max_contiguous(tl.arange(0, COLUMNS), 128 // dtype.primitive_bitwidth)
    tl.store(normed_ptr + token * SIZE + columns, normed, mask=is_column)


@triton.jit
def _gate_kernel(
    gate_up_ptr, gated_ptr, gate_up_stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr
):
    dependent_launch.let_next_start(DEPENDENT_LAUNCH)
    dependent_launch.wait(DEPENDENT_LAUNCH)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    dtype = gated_ptr.dtype.element_ty
    row_ptr = gate_up_ptr + token * gate_up_stride
    gate = tl.load(row_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(gated_ptr + token * SIZE + columns, (activated * up).to(dtype), mask=is_column)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_gate_kernel(
    hidden_ptr,
    weight_ptr,
    gated_ptr,
    num_tokens,
    hidden_stride,
    SIZE: tl.constexpr,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    OPERAND: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """A tile of columns of gate and up, and their product: a stream of weights, each read once."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tokens = tl.arange(0, TOKENS)
    inputs = tl.arange(0, STEP)
    is_token = (tokens < num_tokens)[:, None]
    hidden_ptrs = hidden_ptr + (tokens * hidden_stride)[:, None] + inputs[None, :]
    gate_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    up_ptrs = gate_ptrs + SIZE * INPUTS
    dependent_launch.let_next_start(DEPENDENT_LAUNCH)
    dependent_launch.wait(DEPENDENT_LAUNCH)
    gate = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, STEP):
        hidden = tl.load(hidden_ptrs + start, mask=is_token, other=0.0).to(OPERAND)
        gate = tl.dot(hidden, tl.load(gate_ptrs + start).to(OPERAND).T, gate)
        up = tl.dot(hidden, tl.load(up_ptrs + start).to(OPERAND).T, up)
    dtype = gated_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    gated = activated * up.to(dtype).to(tl.float32)
    tl.store(gated_ptr + (tokens * SIZE)[:, None] + columns[None, :], gated.to(dtype), mask=is_token)


@triton.jit
def _quantize_kernel(
    rows_ptr,
    values_ptr,
    scales_ptr,
    row_stride,
    max_value,
    min_scale,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One row, in parts: once for its largest number, and once more, from the cache, to divide by the scale."""
    dependent_launch.let_next_start(DEPENDENT_LAUNCH)
    dependent_launch.wait(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = rows_ptr + row * row_stride
    largest = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        wide = tl.load(row_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(wide))
    scale = _row_scale(tl.max(largest, 0), max_value, min_scale)
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        wide = tl.load(row_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        values = _in_eight_bits(wide, inverse, max_value, values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * SIZE + columns, values, mask=columns < SIZE)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _row_scale(largest, max_value, min_scale):
    return tl.maximum(tl.div_rn(largest, max_value), min_scale)


@triton.jit
def _in_eight_bits(wide, inverse, max_value, dtype: tl.constexpr):
    return tl.minimum(tl.maximum(wide * inverse, -max_value), max_value).to(dtype)
