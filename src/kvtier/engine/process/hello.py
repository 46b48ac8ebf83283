"""The description of an engine for users and other processes: values that are known once it has started."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

import msgspec
import torch

from kvtier.engine.engine import Engine
from kvtier.engine.process.messages import MAX_SPECIAL_TOKENS, EngineHello
from kvtier.engine.sampling_params import SamplingParams
from kvtier.models.generation_defaults import read_generation_defaults
from kvtier.models.model import Model
from kvtier.models.several_calls import takes_several_calls
from kvtier.models.slot import SlotKind

logger = logging.getLogger(__name__)

_WEIGHTS_PER_ELEMENT = {SlotKind.WEIGHT: 1, SlotKind.BIAS: 1, SlotKind.NORM: 1, SlotKind.PACKED: 8}


def hello_of(engine: Engine, *, name: str, model: str, started_at: float) -> EngineHello:
    """The `EngineHello` of the engine called `name`, whose model is served as `model`. Any thread."""
    loaded, arena, tokenizer = engine.loaded, engine.arena, engine.tokenizer
    return EngineHello(
        engine=name,
        model=model,
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
        tool_template="" if tokenizer is None else tokenizer.tool_template,
        started_at=started_at,
        default_options=_default_options(loaded.folder),
        special_tokens={} if tokenizer is None else _first_of(tokenizer.special_tokens),
        takes_several_calls=takes_several_calls(tokenizer),
    )


def _default_options(folder: Path | None) -> dict[str, float | int]:
    """The model's generation defaults, without unusable ones."""
    options = read_generation_defaults(folder)
    for name, value in list(options.items()):
        try:
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            logger.warning("the model's generation config is ignored in part: %s", error)
            del options[name]
    return options


def _first_of(special_tokens: dict[str, int]) -> dict[str, int]:
    """As many special tokens as an `EngineHello` may have."""
    return dict(itertools.islice(special_tokens.items(), MAX_SPECIAL_TOKENS))


def count_parameters(model: Model) -> int:
    """Count as the model's makers do: quantised weights as the originals they stand for, tied embeddings once."""
    return sum(
        math.prod(slot.shape) * _WEIGHTS_PER_ELEMENT.get(slot.kind, 0)
        for slot in model.checkpoint_slots()
        if slot.is_required
    )
