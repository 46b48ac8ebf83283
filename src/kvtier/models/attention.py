"""The attention that a model calls. The engine implements it over its paged cache, a test over a dense one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvtier.kernels.rotation import Rotation


class Attention(Protocol):
    """The attention of one step, over all its requests; it knows positions, blocks and windows, the model does not."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation) -> Tensor:
        """Store `key` and `value` (T, kv_heads, head_dim) of `layer`, and attend with `query` (T, heads, head_dim).

        Query and key are rotated first, possibly in place. Rows of all three may lie apart in memory; a head's numbers
        are adjacent. Scores are scaled by head_dim ** -0.5. Returns (T, heads * head_dim).
        """
        ...
