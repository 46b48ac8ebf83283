"""What an engine is, as people and other processes are told: values that are known once it has started."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvtier.engine.engine import Engine
from kvtier.models.model import Model
from kvtier.models.slot import SlotKind

_WEIGHTS_PER_ELEMENT = {SlotKind.WEIGHT: 1, SlotKind.BIAS: 1, SlotKind.NORM: 1, SlotKind.PACKED: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """`weights_bytes` and `kv_bytes` are on the device, `namespace` is in hex; what a model lacks is empty."""

    model: str
    architecture: str
    dtype: str
    quantization: str
    weights_bytes: int
    num_parameters: int
    vocab_size: int
    max_model_len: int
    block_tokens: int
    num_blocks: int
    kv_bytes: int
    device: str
    namespace: str
    has_tokenizer: bool
    chat_template: str


def facts_of(engine: Engine) -> EngineFacts:
    """Any thread."""
    loaded, arena, tokenizer = engine.loaded, engine.arena, engine.tokenizer
    return EngineFacts(
        model=engine.name,
        architecture=loaded.config.architecture,
        dtype=loaded.dtype,
        quantization=loaded.quantization,
        weights_bytes=loaded.weights_bytes,
        num_parameters=count_parameters(loaded.model),
        vocab_size=loaded.config.vocab_size,
        max_model_len=engine.max_model_len,
        block_tokens=engine.config.block_size,
        num_blocks=arena.num_blocks,
        kv_bytes=arena.nbytes,
        device=torch.cuda.get_device_name(arena.device) if arena.device.type == "cuda" else str(arena.device),
        namespace=engine.namespace.hex(),
        has_tokenizer=tokenizer is not None and not tokenizer.is_absent,
        chat_template="" if tokenizer is None else tokenizer.chat_template,
    )


def count_parameters(model: Model) -> int:
    """As the model's makers count them: quantised weights as the ones they stand for, tied embeddings once."""
    return sum(
        math.prod(slot.shape) * _WEIGHTS_PER_ELEMENT.get(slot.kind, 0)
        for slot in model.checkpoint_slots()
        if slot.is_required
    )
