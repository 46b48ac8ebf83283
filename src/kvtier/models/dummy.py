"""Random weights for any config: for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import torch
from torch import Tensor

from kvtier.models.config import ModelConfig
from kvtier.models.model import Model
from kvtier.models.slot import SlotKind, WeightSlot

_BIAS_STD = 0.02
_GPTQ_SCALE = 0.003


def fill_with_dummy_weights(model: Model, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Fill every slot with numbers made on `device`; the same seed, device kind and torch give the same weights.

    Weights have a spread of 1 / sqrt(inputs), so that activations keep their scale through any number of layers.
    """
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    for slot in model.checkpoint_slots():
        if slot.is_required and slot.kind is not SlotKind.GROUPS:  # by default, groups are runs of inputs
            slot.write(_make(slot, dtype, device, generator))


def dummy_identity(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int) -> str:
    """The equivalent of `weights_identity` for a checkpoint: equal exactly if the weights are."""
    text = json.dumps(
        ["dummy", asdict(config), str(dtype), torch.device(device).type, torch.__version__, seed],
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _make(slot: WeightSlot, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    match slot.kind:
        case SlotKind.WEIGHT:
            return _normal(slot.shape, slot.shape[-1] ** -0.5, dtype, device, generator)
        case SlotKind.BIAS:
            return _normal(slot.shape, _BIAS_STD, dtype, device, generator)
        case SlotKind.NORM:
            return torch.ones(slot.shape, dtype=dtype, device=device)
        case SlotKind.SCALES:
            return torch.full(slot.shape, _GPTQ_SCALE, dtype=dtype, device=device)
        case SlotKind.ZEROS:
            return torch.full(slot.shape, 0x77777777, dtype=torch.int32, device=device)
        case _:
            limits = torch.iinfo(torch.int32)
            return torch.randint(
                limits.min, limits.max, slot.shape, dtype=torch.int32, device=device, generator=generator
            )


def _normal(
    shape: tuple[int, ...], std: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
