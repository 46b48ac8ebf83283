"""The small operations between matrix products: fused kernels on a GPU, their twins in plain torch elsewhere.

Normalisation computes in float32 and returns its input's dtype. Nothing here waits for the device or has a shape that
depends on values. The twins are `plain_...`; the kernels are tested against them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kvtier.kernels.backend import elementwise_for


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden` (T, size) over its root mean square along the last dimension, times `weight`."""
    fused = elementwise_for(hidden)
    return plain_rms_norm(hidden, weight, eps) if fused is None else fused.rms_norm(hidden, weight, eps)


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `hidden` and `residual`, normalised, and the sum itself."""
    fused = elementwise_for(hidden)
    if fused is None:
        return plain_add_rms_norm(hidden, residual, weight, eps)
    return fused.add_rms_norm(hidden, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension of (T, 2 * size)."""
    fused = elementwise_for(gate_up)
    return plain_silu_mul(gate_up) if fused is None else fused.silu_mul(gate_up)


def linear_silu_mul(hidden: Tensor, weight: Tensor) -> Tensor:
    """`silu_mul` of `hidden` (T, inputs) times `weight` (2 * size, inputs) transposed."""
    fused = elementwise_for(hidden)
    gated = None if fused is None else fused.linear_silu_mul(hidden, weight)
    return silu_mul(functional.linear(hidden, weight)) if gated is None else gated


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def plain_add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + hidden
    return plain_rms_norm(total, weight, eps), total


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
