"""How far the KV of a block is from the same block computed again, and how far rounding alone can take it.

Two correct computations of one block differ if their batches, chunks or kernels sum in different orders. That
difference grows with the layer, and is a few units of the compute dtype. A wrong block differs by about its own
magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FINEST_UNIT = 2.0**-10
"""Applies to float32, too: GPUs may round the factors of its products this coarsely."""
_QUANTIZED_UNIT = 2.0**-5
"""The unit of quantized products, whose inputs may fall on either side of a coarse step."""
_FIRST_LAYER_UNITS = 4
_MOST_OF_BLOCK = 0.5
_TOKEN_OVER_BLOCK = 4.0
_MOST_OF_TOKEN = 0.8
_NOISE_FACTOR = 8.0
"""A correct block may be this many times as far away as two consecutive computations are from each other."""
_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class Deviation:
    """By layer, for its worst head's keys or values: how far off the whole block is, and its worst token.

    Both are relative to the size of the computed values; infinite if either is not a number.
    """

    of_block: list[float]
    of_token: list[float]


@dataclass(frozen=True, slots=True)
class Excess:
    """Where a deviation exceeds its bound the most: in `layer`, it is `deviation`, which is `times` the bound."""

    times: float
    layer: int
    deviation: float


def deviation(served: torch.Tensor, computed: torch.Tensor) -> Deviation:
    """The deviation of one block, shaped as in its layout: `(layers, kv_heads, tokens, keys then values)`."""
    with torch.inference_mode():
        halves = (2, served.shape[-1] // 2)
        expected = computed.float().unflatten(-1, halves)
        distance = (served.float().unflatten(-1, halves) - expected).norm(dim=-1)
        size = expected.norm(dim=-1)
        block_size = size.square().mean(dim=2, keepdim=True).sqrt().clamp_min(_SMALLEST_NORM)
        # A token far smaller than its neighbours is measured relative to them: it weighs little in attention.
        of_token = (distance / torch.maximum(size, block_size)).amax(dim=(1, 2, 3))
        of_block = (distance.square().mean(dim=2, keepdim=True).sqrt() / block_size).amax(dim=(1, 2, 3))
        both = torch.stack([of_block, of_token]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        found: list[list[float]] = both.tolist()
    return Deviation(*found)


class RoundingBounds:
    """How much rounding alone can change a block, by layer."""

    def __init__(self, dtype: torch.dtype, num_layers: int, *, is_quantized: bool) -> None:
        unit = max(torch.finfo(dtype).eps, _QUANTIZED_UNIT if is_quantized else _FINEST_UNIT)
        units = [unit * (_FIRST_LAYER_UNITS + layer) for layer in range(num_layers)]
        self._of_block = [min(_MOST_OF_BLOCK, one) for one in units]
        self._of_token = [min(_MOST_OF_TOKEN, _TOKEN_OVER_BLOCK * one) for one in units]

    def excess(self, found: Deviation, noise: Deviation | None = None) -> Excess:
        """The excess of a deviation. `noise` is how far two computations were from each other, if that was measured."""
        worst = Excess(0.0, 0, 0.0)
        for is_token, deviations, bounds, most in (
            (False, found.of_block, self._of_block, _MOST_OF_BLOCK),
            (True, found.of_token, self._of_token, _MOST_OF_TOKEN),
        ):
            noises = None if noise is None else noise.of_token if is_token else noise.of_block
            for layer, one in enumerate(deviations):
                bound = bounds[layer]
                if noises is not None:
                    bound = max(bound, min(most, _NOISE_FACTOR * noises[layer]))
                if one / bound > worst.times:
                    worst = Excess(one / bound, layer, one)
        return worst
