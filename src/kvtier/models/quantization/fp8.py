"""Linear layers in 8-bit floats: weights quantised per output while loading, inputs per token as they arrive.

A matrix product of float8_e4m3fn values, scaled by row and column. GPUs of the Hopper generation or later have it in
hardware; elsewhere the same numbers are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.backend import elementwise_for, fp8_product_for
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.models.fused_operations import add_rms_norm, rms_norm, silu_mul
from kvtier.models.layer import empty_parameter
from kvtier.models.linear import Linear, LinearShape
from kvtier.models.slot import SlotKind, WeightSlot

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max
_MIN_SCALE = 1e-12  # a row of zeros stays zeros
_ALIGNMENT = 16


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` (R, N) as float8 values and float32 scales (R, 1); their product is nearly `rows` again."""
    fused = elementwise_for(rows)
    if fused is None:
        return plain_quantize_rows(rows)
    return fused.quantize_rows(rows, max_value=_FP8_MAX, min_scale=_MIN_SCALE)


def plain_quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    wide = rows.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / _FP8_MAX).clamp(min=_MIN_SCALE)
    return (wide / scales).clamp(-_FP8_MAX, _FP8_MAX).to(FP8), scales


def quantized_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """`quantize_rows` of the sum of `hidden` and `residual`, normalised, and the sum (`hidden` without a residual)."""
    fused = elementwise_for(hidden)
    if fused is not None:
        return fused.quantized_rms_norm(hidden, residual, weight, eps, max_value=_FP8_MAX, min_scale=_MIN_SCALE)
    if residual is None:
        normed, total = rms_norm(hidden, weight, eps), hidden
    else:
        normed, total = add_rms_norm(hidden, residual, weight, eps)
    return QuantizedRows(*quantize_rows(normed), hidden.dtype), total


def scaled_matmul(
    values: Tensor,
    value_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """`(values * value_scales) (weight * weight_scales)^T + bias` for float8 `values` (T, K) and `weight` (N, K)."""
    if values.is_cuda:
        # Scaling by row returns bfloat16 only, and adds a bias of bfloat16.
        adds_bias = bias is not None and bias.dtype == torch.bfloat16
        product = torch._scaled_mm(
            values,
            weight.t(),
            scale_a=value_scales,
            scale_b=weight_scales.t(),
            bias=bias if adds_bias else None,
            out_dtype=torch.bfloat16,
        ).to(dtype)
        return product if adds_bias or bias is None else product + bias
    product = ((values.float() @ weight.float().t()) * value_scales * weight_scales.t()).to(dtype)
    return product if bias is None else product + bias


class Fp8Linear(Linear):
    """One byte per weight and one scale per output."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        if shape.inputs % _ALIGNMENT or shape.outputs % _ALIGNMENT:
            raise ConfigError(
                f"fp8 needs linear layers whose sizes are multiples of {_ALIGNMENT}, "
                f"{shape.parts[0].name} is {shape.outputs} x {shape.inputs}"
            )
        self.weight = empty_parameter((shape.outputs, shape.inputs), FP8, shape.device)
        self.scales = empty_parameter((shape.outputs, 1), torch.float32, shape.device)
        product = fp8_product_for(self.weight)
        self.counters = None if product is None else product.make_counters(shape.outputs, shape.device)

    def weight_slots(self, name: str, number: int, outputs: slice) -> Iterator[WeightSlot]:
        weight, scales = self.weight[outputs], self.scales[outputs]

        def write(tensor: Tensor) -> None:
            # Rounded to the computation's dtype first, so that loading in another one changes nothing by itself.
            values, row_scales = quantize_rows(tensor.to(self.shape.device).to(self.shape.dtype))
            weight.copy_(values)
            scales.copy_(row_scales)

        yield WeightSlot(f"{name}.weight", tuple(weight.shape), SlotKind.WEIGHT, write)

    def forward(self, hidden: Tensor | QuantizedRows, peaks: Tensor | None = None) -> Tensor:
        """`peaks` (T, P), if known: the largest number of each row of `hidden` is the largest of these."""
        product = fp8_product_for(self.weight)
        if product is not None and self.counters is not None:
            out = product.linear(
                hidden,
                self.weight,
                self.scales,
                self.bias,
                self.counters,
                max_value=_FP8_MAX,
                min_scale=_MIN_SCALE,
                peaks=peaks,
            )
            if out is not None:
                return out
        is_quantized = isinstance(hidden, QuantizedRows)
        values, value_scales = (hidden.values, hidden.scales) if is_quantized else quantize_rows(hidden)
        return scaled_matmul(values, value_scales, self.weight, self.scales, hidden.dtype, self.bias)

    def gated(self, hidden: Tensor | QuantizedRows) -> tuple[Tensor, Tensor | None]:
        """`silu_mul` of the result of `forward`, and its `peaks` if known."""
        product = fp8_product_for(self.weight)
        if product is not None and self.counters is not None:
            found = product.linear_silu_mul(
                hidden,
                self.weight,
                self.scales,
                self.bias,
                self.counters,
                max_value=_FP8_MAX,
                min_scale=_MIN_SCALE,
            )
            if found is not None:
                return found
        return silu_mul(self(hidden)), None
