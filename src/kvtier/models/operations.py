"""The small operations between matrix products: fused kernels on a GPU, their twins in plain torch elsewhere.

Normalisation and rotation compute in float32 and return the dtype of what they were given. Nothing here waits for
the device or has a shape that depends on values. `plain_...` are the twins, and what the kernels are tested against.
"""

from __future__ import annotations

import torch
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


def rotate(
    heads: Tensor,
    cos_sin: Tensor,
    *,
    is_interleaved: bool,
    num_query_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Rotate `heads` (T, heads, head_dim), of the query and then of the key, by `cos_sin` (T, rotary_dim).

    Number i of a head is paired with i + rotary_dim / 2, or 2i with 2i + 1 where they are interleaved. With `norms`,
    weights of the query's and of the key's heads, each head is normalised first. What was in `heads` may be gone.
    """
    fused = elementwise_for(heads)
    turn = plain_rotate if fused is None else fused.rotate
    return turn(heads, cos_sin, is_interleaved=is_interleaved, num_query_heads=num_query_heads, norms=norms, eps=eps)


def plain_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def plain_add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + hidden
    return plain_rms_norm(total, weight, eps), total


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def plain_rotate(
    heads: Tensor,
    cos_sin: Tensor,
    *,
    is_interleaved: bool,
    num_query_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    if norms is not None:
        query, key = heads.tensor_split((num_query_heads,), dim=1)
        heads = torch.cat((plain_rms_norm(query, norms[0], eps), plain_rms_norm(key, norms[1], eps)), dim=1)
    return _rotate_pairs(heads, cos_sin) if is_interleaved else _rotate_halves(heads, cos_sin)


def _rotate_halves(heads: Tensor, cos_sin: Tensor) -> Tensor:
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return _with_rest(rotated, heads, rotary_dim)


def _rotate_pairs(heads: Tensor, cos_sin: Tensor) -> Tensor:
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    even, odd = heads[..., :rotary_dim].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(heads.dtype)
    return _with_rest(rotated, heads, rotary_dim)


def _with_rest(rotated: Tensor, heads: Tensor, rotary_dim: int) -> Tensor:
    if rotary_dim == heads.shape[-1]:
        return rotated
    return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
