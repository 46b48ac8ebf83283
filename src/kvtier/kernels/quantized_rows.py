"""Rows of numbers in 8-bit floats, as norms hand them to products."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Float8 `values` (T, N) and float32 `scales` (T, 1); their product is nearly the rows.

    `dtype` is that of the original rows, and of results computed from them.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device
