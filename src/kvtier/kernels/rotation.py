"""How a layer's queries and keys are rotated to their positions; in plain torch here, in `kv_write` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of one layer's heads in one step."""

    cos_sin: Tensor
    """`(tokens, rotary_dim)` float32: cosines, then sines. Numbers of a head beyond `rotary_dim` stay as they are."""
    is_interleaved: bool
    """Number 2i of a head is paired with 2i + 1, not i with i + rotary_dim / 2."""
    norms: tuple[Tensor, Tensor] | None
    """Weights `(head_dim,)` with which each head of the query, and of the key, is normalised before it rotates."""
    eps: float


def rotate(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """`query` and `key` (T, heads, head_dim), normalised and rotated in float32, in the dtypes that they have."""
    if rotation.norms is not None:
        query, key = (
            functional.rms_norm(heads, weight.shape, weight, rotation.eps)
            for heads, weight in zip((query, key), rotation.norms, strict=True)
        )
    turn = _rotate_pairs if rotation.is_interleaved else _rotate_halves
    return turn(query, rotation.cos_sin), turn(key, rotation.cos_sin)


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
