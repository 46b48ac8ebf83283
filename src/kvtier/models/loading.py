"""From a folder, a hub name or a bare config to a model on its device.

Tensors go one by one from mapped files into the (merged, cast or quantised) parameters, so peak memory is the model
plus one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kvtier.blocks.full_identity import IdentityKind, identity_of_folder
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.errors import ConfigError
from kvtier.models.checkpoint import Checkpoint
from kvtier.models.config import COMPUTE_DTYPES, ModelConfig, read_config
from kvtier.models.dummy import dummy_identity, fill_with_dummy_weights
from kvtier.models.families import make_model
from kvtier.models.hub import find_model_folder
from kvtier.models.linear import LinearKind, PlainLinear
from kvtier.models.model import Model
from kvtier.models.progress import Advance, terminal_progress
from kvtier.models.quantization.fp8 import Fp8Linear
from kvtier.models.quantization.gptq import GptqLinear
from kvtier.models.recipe import Recipe
from kvtier.models.slot import WeightSlot
from kvtier.models.weight_files import StoredTensor

DUMMY_SEED = 0

LoadProgress = Callable[[str, int], AbstractContextManager[Advance]]
"""Makes the scope of one load from its title and its number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run. `folder` is None if it was made from a bare config."""

    model: Model
    config: ModelConfig
    dtype: str
    folder: Path | None
    weights_bytes: int
    weights_identity: str
    quantization: str
    trust_remote_code: bool = False

    def namespace_fields(self, layout: KvLayout, *, salt: str = "") -> NamespaceFields:
        """Everything that distinguishes the blocks of this model from others; `layout` is that of its blocks."""
        return NamespaceFields(
            layout=layout,
            weights=self.weights_identity,
            model_config=self.config.kv_identity(),
            quantization=self.quantization,
            compute_dtype=self.dtype,
            salt=salt,
        )


def load_model(
    model: str | Path | Mapping[str, Any],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cuda",
    load_format: Literal["auto", "dummy"] = "auto",
    quantization: Literal["fp8"] | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    identity: IdentityKind = "sampled",
    seed: int = DUMMY_SEED,
    progress: LoadProgress = terminal_progress,
) -> LoadedModel:
    """Load `model`: a folder, a hub name, or (with dummy weights only) the content of a config.json.

    `dtype` "auto" is the checkpoint's own; `max_model_len` limits the positions, by default to the config's maximum.
    `identity` says how weights are identified: by samples of every tensor, or by all bytes ("full").
    With `load_format` "dummy", no weight file is needed or read, and `seed` picks the weights. No code of a checkpoint
    is run here: `trust_remote_code` is passed on to the tokenizer. Raises `ConfigError` with one sentence if the model
    cannot be loaded.
    """
    _check_choices(load_format=load_format, quantization=quantization, max_model_len=max_model_len)
    is_dummy = load_format == "dummy"
    folder: Path | None = None
    if isinstance(model, Mapping):
        if not is_dummy:
            raise ConfigError("a bare model config has no weights: load it with load_format dummy")
        config = read_config(model)
    else:
        folder = find_model_folder(model, revision=revision, cache_dir=cache_dir, has_weights=not is_dummy)
        config = read_config(folder)
    dtype_name = config.dtype if dtype == "auto" else str(dtype).removeprefix("torch.")
    if dtype_name not in COMPUTE_DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(COMPUTE_DTYPES)}, not {dtype}")
    torch_dtype, torch_device = getattr(torch, dtype_name), _device(device)
    checkpoint = None if is_dummy or folder is None else Checkpoint(folder)
    network = make_model(
        Recipe(
            config=config,
            dtype=torch_dtype,
            device=torch_device,
            linear=_linear_kind(config, quantization),
            max_positions=max_model_len or config.max_position_embeddings,
        )
    )
    if (max_model_len or 0) > config.max_position_embeddings:  # the model was not trained for more
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model has {config.max_position_embeddings} positions"
        )
    if checkpoint is None:
        fill_with_dummy_weights(network, dtype=torch_dtype, device=torch_device, seed=seed)
        weights_identity = dummy_identity(config, dtype=torch_dtype, device=torch_device, seed=seed)
    else:
        fill_from_checkpoint(network, checkpoint, progress)
        weights_identity = identity_of_folder(checkpoint.folder, identity, progress)
    network.finish_loading()
    network.eval()
    return LoadedModel(
        model=network,
        config=config,
        dtype=dtype_name,
        folder=folder,
        weights_bytes=network.weights_bytes(),
        weights_identity=weights_identity,
        quantization=quantization or ("gptq" if config.quantization else ""),
        trust_remote_code=trust_remote_code,
    )


def fill_from_checkpoint(model: Model, checkpoint: Checkpoint, progress: LoadProgress = terminal_progress) -> None:
    """Write every tensor of `checkpoint` into its slot.

    Names and shapes are compared before the first byte is read; raises `ConfigError` if they do not agree.
    """
    slots = {slot.name: slot for slot in model.checkpoint_slots()}
    _compare(slots, checkpoint, model)
    with progress(f"Loading {checkpoint.folder.name}", checkpoint.nbytes) as advance:
        for stored, tensor in checkpoint.read():
            slot = slots.get(stored.name)
            if slot is not None:
                slot.write(tensor)
            advance(stored.nbytes)


def _compare(slots: dict[str, WeightSlot], checkpoint: Checkpoint, model: Model) -> None:
    folder = checkpoint.folder
    for name, slot in slots.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            if slot.is_required:
                raise ConfigError(f"the weights in {folder} lack the tensor {name}")
        else:
            _compare_one(slot, stored)
    for name in checkpoint.tensors:
        if name not in slots and not model.is_ignored(name):
            raise ConfigError(f"{model.config.architecture} has no place for the tensor {name} in {folder}")


def _compare_one(slot: WeightSlot, stored: StoredTensor) -> None:
    if stored.shape != slot.shape:
        raise ConfigError(
            f"the tensor {slot.name} in {stored.path} has the shape {list(stored.shape)}, "
            f"but its config.json asks for {list(slot.shape)}"
        )
    if stored.is_integer != slot.kind.is_integer:
        expected = "whole numbers" if slot.kind.is_integer else "floating point numbers"
        raise ConfigError(f"the tensor {slot.name} in {stored.path} must hold {expected}, not {stored.dtype}")


def _linear_kind(config: ModelConfig, quantization: str | None) -> LinearKind:
    if config.quantization is None:
        return PlainLinear if quantization is None else Fp8Linear
    if quantization is not None:
        raise ConfigError(f"quantization {quantization} cannot be applied to weights that are GPTQ-quantised already")
    return functools.partial(GptqLinear, config.quantization)


def _check_choices(*, load_format: str, quantization: str | None, max_model_len: int | None) -> None:
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be auto or dummy, not {load_format!r}")
    if quantization not in (None, "fp8"):
        raise ConfigError(f"quantization must be fp8 or none, not {quantization!r}")
    if max_model_len is not None and max_model_len <= 0:
        raise ConfigError(f"max_model_len must be positive, not {max_model_len}")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the device {device} cannot be used: {reason}") from error
