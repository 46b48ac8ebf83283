"""The small operations between matrix products, in plain torch and in one place for fused kernels to replace.

Normalisation and rotation compute in float32 and return the dtype of what they were given. Nothing here waits for
the device or has a shape that depends on values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`hidden` over its root mean square along the last dimension, times `weight`."""
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `hidden` and `residual`, normalised, and the sum itself."""
    total = residual + hidden
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate_halves(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate `heads` (T, heads, head_dim) by `cos_sin` (T, rotary_dim), pairing i with i + rotary_dim / 2."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return _with_rest(rotated, heads, rotary_dim)


def rotate_pairs(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate `heads` (T, heads, head_dim) by `cos_sin` (T, rotary_dim), pairing 2i with 2i + 1."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    even, odd = heads[..., :rotary_dim].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(heads.dtype)
    return _with_rest(rotated, heads, rotary_dim)


def _with_rest(rotated: Tensor, heads: Tensor, rotary_dim: int) -> Tensor:
    if rotary_dim == heads.shape[-1]:
        return rotated
    return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
