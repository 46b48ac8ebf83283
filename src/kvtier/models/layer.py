"""The root of every layer here: a torch module that knows which tensors of a checkpoint it takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvtier.models.slot import WeightSlot


class Layer(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy
    """For inference only: parameters take no gradient."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The slots of this layer, without its children's; `prefix` is its own name in the checkpoint."""
        return iter(())

    def finish_loading(self) -> None:
        """Called once, when all weights are loaded."""


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter without gradient, whose values are written later."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
