"""How one model is made: its config, and the dtype, device and kind of linear layer for its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.models.config import ModelConfig
from kvtier.models.linear import Linear, LinearKind, LinearPart, LinearShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`linear` is the kind for the layers of a block; the embedding and the head stay plain."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    linear: LinearKind
    max_positions: int

    def make_linear(self, inputs: int, parts: dict[str, int], *, bias: bool) -> Linear:
        """A linear layer whose `parts` (name in the checkpoint: outputs) are stacked in that order."""
        return self.linear(
            LinearShape(
                inputs=inputs,
                parts=tuple(LinearPart(name, outputs) for name, outputs in parts.items()),
                has_bias=bias,
                dtype=self.dtype,
                device=self.device,
            )
        )
