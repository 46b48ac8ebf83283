"""A slot: the place in a model where one tensor of a checkpoint goes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


class SlotKind(enum.Enum):
    """The purpose of a tensor; random weights depend on it."""

    WEIGHT = enum.auto()  # (outputs, inputs)
    BIAS = enum.auto()
    NORM = enum.auto()
    PACKED = enum.auto()  # 4-bit weights, eight to an int32
    ZEROS = enum.auto()  # 4-bit zero points, eight to an int32
    SCALES = enum.auto()
    GROUPS = enum.auto()  # int32: the group of each input

    @property
    def is_integer(self) -> bool:
        return self in (SlotKind.PACKED, SlotKind.ZEROS, SlotKind.GROUPS)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """`write` takes a tensor of `shape` on any device and puts it, cast or quantised, into its part of a parameter.

    A checkpoint may leave out a slot that is not required.
    """

    name: str
    shape: tuple[int, ...]
    kind: SlotKind
    write: Callable[[Tensor], object]
    is_required: bool = True
