"""Linear layers: their common base, and the plain one.

One layer may hold several tensors of a checkpoint stacked along its outputs (query, key and value; gate and up), so
that one matrix product serves them all. Kinds differ in how they keep the weight: see also `fp8` and `gptq`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.kernels.backend import plain_product_for
from kvtier.models.layer import Layer, empty_parameter
from kvtier.models.slot import SlotKind, WeightSlot


@dataclass(frozen=True, slots=True)
class LinearPart:
    """The outputs that come from one tensor: the tensor's name instead of the layer's, and their number."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """The shape of a linear layer and its device; `dtype` is that of its input and output."""

    inputs: int
    parts: tuple[LinearPart, ...]
    has_bias: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    def ranges(self) -> Iterator[tuple[LinearPart, slice]]:
        """Each part and its place among the outputs."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.outputs)
            start += part.outputs


class Linear(Layer):
    """`x (T, inputs) -> x W^T + b (T, outputs)`."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape
        self.bias = empty_parameter((shape.outputs,), shape.dtype, shape.device) if shape.has_bias else None

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        parent = prefix.rpartition(".")[0]
        for number, (part, outputs) in enumerate(self.shape.ranges()):
            name = f"{parent}.{part.name}" if parent else part.name
            yield from self.weight_slots(name, number, outputs)
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (part.outputs,), SlotKind.BIAS, self.bias[outputs].copy_)

    def weight_slots(self, name: str, number: int, outputs: slice) -> Iterator[WeightSlot]:
        """The slots of the weight of part `number`; `name` is the part's own name in the checkpoint."""
        raise NotImplementedError


LinearKind = Callable[[LinearShape], Linear]


class PlainLinear(Linear):
    """The weight as in the checkpoint, in the dtype of the computation."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self.weight = empty_parameter((shape.outputs, shape.inputs), shape.dtype, shape.device)
        product = plain_product_for(self.weight)
        self.counters = None if product is None else product.make_counters(shape.outputs, shape.device)

    def weight_slots(self, name: str, number: int, outputs: slice) -> Iterator[WeightSlot]:
        rows = self.weight[outputs]
        yield WeightSlot(f"{name}.weight", tuple(rows.shape), SlotKind.WEIGHT, rows.copy_)

    def forward(self, hidden: Tensor) -> Tensor:
        product = plain_product_for(hidden)
        if product is not None and self.counters is not None:
            out = product.linear(hidden, self.weight, self.bias, self.counters)
            if out is not None:
                return out
        return functional.linear(hidden, self.weight, self.bias)
