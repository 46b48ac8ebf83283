"""Linear layers whose weights are in 4 bits in a GPTQ checkpoint, dequantised on the way into each matrix product.

A weight is `(q - zero) * scale`. `qweight` (inputs / 8, outputs) packs eight inputs into an int32, `qzeros`
(groups, outputs / 8) eight outputs, the lowest bits first; `scales` is (groups, outputs), and `g_idx` (inputs,) is the
group of each input. If there are kernels for it, the words are rearranged for them once all weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvtier.errors import ConfigError
from kvtier.kernels.backend import Int4Product, int4_product_for
from kvtier.models.layer import empty_parameter
from kvtier.models.linear import Linear, LinearShape
from kvtier.models.quantization.config import GptqConfig
from kvtier.models.slot import SlotKind, WeightSlot

_PER_WORD = 8  # 4-bit numbers in an int32
_ONE_IN_EACH = 0x11111111


def unpack(words: Tensor, dim: int) -> Tensor:
    """The 4-bit numbers in int32 `words`, as int32: dimension `dim` becomes eight times as long."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    dim %= words.dim()
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = _PER_WORD
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & 0xF).flatten(dim, dim + 1)


def dequantize(qweight: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (outputs, inputs) in `dtype`, multiplied out in float32; `zeros` are packed and have no offset."""
    levels = unpack(qweight, 0) - unpack(zeros, 1)[groups]
    return (levels * scales.float()[groups]).to(dtype).t()


class GptqLinear(Linear):
    """Half a byte per weight, a scale and a zero point per group of inputs and output.

    `zeros` are kept without the offset of the first format: its writers subtract one from each 4-bit number of a word,
    with borrow, so adding them back to the whole word is exact even for a zero point of 0.
    """

    def __init__(self, config: GptqConfig, shape: LinearShape) -> None:
        super().__init__(shape)
        self.config = config
        group_size = config.group_size or shape.inputs
        for part in shape.parts:
            if shape.inputs % group_size or shape.inputs % _PER_WORD or part.outputs % _PER_WORD:
                raise ConfigError(
                    f"a GPTQ layer needs inputs in whole groups of {group_size} and sizes that are multiples of "
                    f"{_PER_WORD}, {part.name} is {part.outputs} x {shape.inputs}"
                )
        num_groups = shape.inputs // group_size
        outputs, device = shape.outputs, shape.device
        self.qweight = empty_parameter((shape.inputs // _PER_WORD, outputs), torch.int32, device)
        self.zeros = empty_parameter((num_groups, outputs // _PER_WORD), torch.int32, device)
        # Never bfloat16: checkpoints have float16 scales, and bits lost here are lost in every weight.
        scale_dtype = torch.float32 if shape.dtype is torch.float32 else torch.float16
        self.scales = empty_parameter((num_groups, outputs), scale_dtype, device)
        self.groups = empty_parameter((len(shape.parts), shape.inputs), torch.int32, device)
        self.groups.copy_(torch.arange(shape.inputs, device=device) // group_size)
        self.has_one_grouping = True
        self.order: Tensor | None = None
        self.counters: Tensor | None = None
        """Set once `qweight` is in the order of the kernels for a few tokens, and `order` if inputs change theirs."""

    def weight_slots(self, name: str, number: int, outputs: slice) -> Iterator[WeightSlot]:
        words = slice(outputs.start // _PER_WORD, outputs.stop // _PER_WORD)
        qweight, zeros, scales = self.qweight[:, outputs], self.zeros[:, words], self.scales[:, outputs]
        offset = _ONE_IN_EACH if self.config.is_zero_stored_less_one else 0

        def write_zeros(tensor: Tensor) -> None:
            zeros.copy_(tensor).add_(offset)

        yield WeightSlot(f"{name}.qweight", tuple(qweight.shape), SlotKind.PACKED, qweight.copy_)
        yield WeightSlot(f"{name}.qzeros", tuple(zeros.shape), SlotKind.ZEROS, write_zeros)
        yield WeightSlot(f"{name}.scales", tuple(scales.shape), SlotKind.SCALES, scales.copy_)
        yield WeightSlot(
            f"{name}.g_idx",
            (self.shape.inputs,),
            SlotKind.GROUPS,
            self.groups[number].copy_,
            is_required=self.config.has_act_order,
        )
        if self.bias is None:
            yield WeightSlot(
                f"{name}.bias",
                (outputs.stop - outputs.start,),
                SlotKind.BIAS,
                lambda tensor: self._add_bias(tensor, outputs),
                is_required=False,
            )

    def finish_loading(self) -> None:
        """Check whether the parts are grouped alike, as parts that share their inputs nearly always are, and pack."""
        groups = self.groups
        if int(groups.min()) < 0 or int(groups.max()) >= self.scales.shape[0]:
            raise ConfigError(
                f"g_idx of {self.shape.parts[0].name} names groups outside 0 to {self.scales.shape[0] - 1}"
            )
        self.has_one_grouping = bool((groups == groups[0]).all())
        product = int4_product_for(self.qweight)
        if product is not None and self.has_one_grouping and self.shape.dtype.itemsize == 2:
            self._pack(product)

    def weight(self) -> Tensor:
        """The weight (outputs, inputs), dequantised, from words in the order of the checkpoint."""
        assert self.counters is None, "the words have been packed"
        dtype = self.shape.dtype
        if self.has_one_grouping:
            return dequantize(self.qweight, self.zeros, self.scales, self.groups[0], dtype)
        return torch.cat(
            [self._part_weight(number, outputs) for number, (_, outputs) in enumerate(self.shape.ranges())]
        )

    def forward(self, hidden: Tensor) -> Tensor:
        product = int4_product_for(hidden)
        if product is None or self.counters is None:
            return functional.linear(hidden, self.weight(), self.bias)
        if self.order is not None:
            hidden = hidden.index_select(1, self.order)
        out = product.linear(hidden, self.qweight, self.zeros, self.scales, self.bias, self.counters)
        if out is not None:
            return out
        weight = product.dequantize(self.qweight, self.zeros, self.scales, self.shape.dtype)
        return functional.linear(hidden, weight, self.bias)

    def _pack(self, product: Int4Product) -> None:
        """Put the words into the kernels' order, if the kernels take this weight; groups become runs of inputs."""
        inputs, group_size = self.shape.inputs, self.shape.inputs // self.scales.shape[0]
        groups, order = self.groups[0].sort(stable=True)
        runs = torch.arange(inputs, device=groups.device) // group_size
        if not product.can_pack(inputs=inputs, group_size=group_size) or not torch.equal(groups, runs.int()):
            return
        self.order = None if torch.equal(self.groups[0], groups) else order
        self.qweight = nn.Parameter(product.pack(self.qweight, order), requires_grad=False)
        self.counters = product.make_counters(self.shape.outputs, self.shape.device)

    def _part_weight(self, number: int, outputs: slice) -> Tensor:
        words = slice(outputs.start // _PER_WORD, outputs.stop // _PER_WORD)
        return dequantize(
            self.qweight[:, outputs],
            self.zeros[:, words],
            self.scales[:, outputs],
            self.groups[number],
            self.shape.dtype,
        )

    def _add_bias(self, tensor: Tensor, outputs: slice) -> None:
        """Some writers give every layer a bias, of zeros if the model has none: those cost nothing here."""
        if not bool(tensor.any()):
            return
        if self.bias is None:
            self.bias = empty_parameter((self.shape.outputs,), self.shape.dtype, self.shape.device)
            self.bias.zero_()
        self.bias[outputs].copy_(tensor)
