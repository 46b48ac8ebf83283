"""Random numbers that depend only on a seed and a position: no state, no order of draws, equal on every device."""

from __future__ import annotations

import torch

_INCREMENT = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58_476D_1CE4_E5B9 - (1 << 64), 0x94D0_49BB_1331_11EB - (1 << 64))
_BITS = 52


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) for each pair of int64: SplitMix64 over the position, then over that and the seed.

    It never rounds to 1, nor does its product with a positive total round to the total.
    """
    mixed = _mix(seeds ^ _mix(positions))
    return _shift(mixed, 64 - _BITS).double() * 2.0**-_BITS


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's step: int64 products wrap, as its unsigned ones do."""
    numbers = numbers + _INCREMENT
    numbers = (numbers ^ _shift(numbers, 30)) * _MULTIPLIERS[0]
    numbers = (numbers ^ _shift(numbers, 27)) * _MULTIPLIERS[1]
    return numbers ^ _shift(numbers, 31)


def _shift(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """A right shift that fills with zeros, where torch's fills with the sign."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)
