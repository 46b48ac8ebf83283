"""Rotary positions: the table of cosines and sines by which heads of query and key are rotated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.rotation import Rotation
from kvtier.models.layer import Layer
from kvtier.models.rope_config import RopeConfig, RopeKind


class Rope(Layer):
    """A float32 table with one row of `rotary_dim` numbers per position: cosines, then sines."""

    table: Tensor

    def __init__(self, config: RopeConfig, max_positions: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("table", _table(config, max_positions, device), persistent=False)

    @property
    def max_positions(self) -> int:
        return int(self.table.shape[0])

    def grow(self, max_positions: int) -> None:
        """Make room for more positions. The table moves, so captured graphs have to be captured again."""
        if max_positions > self.max_positions:
            self.table = _table(self.config, max_positions, self.table.device)

    def rows(self, positions: Tensor) -> Tensor:
        """The rows of `positions` (T,), for `rotation`; every position must be below `max_positions`."""
        return self.table[positions]

    def rotation(self, rows: Tensor, *, norms: tuple[Tensor, Tensor] | None, eps: float) -> Rotation:
        """Rotates by `rows`; normalises first, with `norms`, if given."""
        return Rotation(cos_sin=rows, is_interleaved=self.config.is_interleaved, norms=norms, eps=eps)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each of the `rotary_dim / 2` pairs, in float32 on the CPU."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    match config.kind:
        case RopeKind.LINEAR:
            return frequencies / config.factor
        case RopeKind.LLAMA3:
            return _llama3(config, frequencies)
        case RopeKind.YARN:
            return _yarn(config, frequencies)
        case _:
            return frequencies


def attention_factor(config: RopeConfig) -> float:
    """The factor of cosines and sines."""
    if config.kind is not RopeKind.YARN:
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _table(config: RopeConfig, max_positions: int, device: torch.device) -> Tensor:
    if config.kind is RopeKind.DYNAMIC and max_positions > config.original_max_positions:
        raise ConfigError(
            f"a model with dynamic rope has at most {config.original_max_positions} positions, not {max_positions}: "
            "beyond them cached keys would depend on the length of the sequence"
        )
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(config).to(device))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(config)


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slow pairs are stretched by `factor`, fast ones kept, and those between blended by their wavelength."""
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / config.factor + keep * frequencies


def _yarn(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Like `_llama3`, but blended along a ramp over the pair's number."""
    low = _pair_with_turns(config, config.beta_fast)
    high = _pair_with_turns(config, config.beta_slow)
    if config.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    ramp = (torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretch = ramp.clamp(0.0, 1.0)
    return stretch * frequencies / config.factor + (1 - stretch) * frequencies


def _pair_with_turns(config: RopeConfig, turns: float) -> float:
    """The (fractional) number of the pair that turns `turns` times over the original positions."""
    wavelength = config.original_max_positions / (turns * 2 * math.pi)
    return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
