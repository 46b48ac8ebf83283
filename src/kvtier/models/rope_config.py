"""The parameters of rotary positions, read from either generation of config.json keys.

Older configs have `rope_theta` beside `rope_scaling`; transformers 5 writes both into `rope_parameters`. Their use is
in `kvtier.models.rope`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError
from kvtier.models.json_object import JsonObject
from kvtier.observe.printable import printable

_DEFAULT_THETA = 10000.0
_MAX_SCALED_POSITIONS = 1 << 22


class RopeKind(enum.StrEnum):
    """How frequencies are scaled for contexts longer than the pretraining's."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"  # like DEFAULT up to max_position_embeddings, undefined for a cache beyond
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions over the first `rotary_dim` numbers of a head.

    `is_interleaved` pairs neighbours (0, 1), (2, 3), …; otherwise a number pairs with the one half of `rotary_dim` on.
    `attention_factor` multiplies cos and sin.
    """

    rotary_dim: int
    kind: RopeKind = RopeKind.DEFAULT
    theta: float = _DEFAULT_THETA
    is_interleaved: bool = False
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def max_positions(self) -> int:
        """How many positions the scaling reaches; 0 for a kind that uses `max_position_embeddings`."""
        if self.kind is not RopeKind.YARN:
            return 0
        return int(min(self.original_max_positions * self.factor, _MAX_SCALED_POSITIONS))


def read_rope(
    fields: JsonObject, *, head_dim: int, max_positions: int, is_interleaved: bool, partial_factor: float
) -> RopeConfig:
    """The rope of the config in `fields`; `partial_factor` is the family's share of a head that rotates."""
    parameters = fields.inner("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    name = parameters.text("rope_type", parameters.text("type", "default"))
    if name not in list(RopeKind):
        raise ConfigError(
            f"{parameters.where}: unknown rope type {printable(repr(name))}; known are {', '.join(RopeKind)}"
        )
    partial = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial_factor))
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            f"{fields.where}: partial_rotary_factor {partial} of head_dim {head_dim} must give an even number of "
            f"rotated dimensions, not {rotary_dim}"
        )
    rope = RopeConfig(
        rotary_dim=rotary_dim,
        theta=parameters.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA)),
        is_interleaved=is_interleaved,
        kind=RopeKind(name),
    )
    return _with_scaling(rope, parameters, max_positions)


def _with_scaling(rope: RopeConfig, parameters: JsonObject, max_positions: int) -> RopeConfig:
    if rope.kind is RopeKind.DEFAULT:
        return rope
    factor = parameters.number("factor")
    original = parameters.count("original_max_position_embeddings", max_positions)
    if rope.kind is RopeKind.LINEAR:
        return replace(rope, factor=factor)
    if rope.kind is RopeKind.DYNAMIC:
        return replace(rope, factor=factor, original_max_positions=max_positions)
    if rope.kind is RopeKind.LLAMA3:
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if low >= high:
            raise ConfigError(f"{parameters.where}: low_freq_factor {low} must be below high_freq_factor {high}")
        return replace(rope, factor=factor, original_max_positions=original, low_freq_factor=low, high_freq_factor=high)

    def optional(name: str) -> float | None:
        return parameters.number(name) if parameters.has(name) else None

    return replace(
        rope,
        factor=factor,
        original_max_positions=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        is_truncated=parameters.flag("truncate", True),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )
