"""Shapes of models, to derive the size of their KV and the work of a prefill; and the speeds of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

_MAX_CONFIG_BYTES = 4 << 20
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder: `kv_bytes` per token in all layers; `parameters` counts the weights that one token uses."""

    name: str
    kv_bytes: int
    parameters: float
    attention_width: int
    """Layers x heads x head dimension; the cost of attention to one token is proportional to it."""

    def prefill_flops(self, first: int, end: int) -> float:
        """FLOPs to compute the tokens from `first` to `end` of a prompt; later tokens attend to more tokens."""
        count = end - first
        looked_at = (first + end) / 2 * count
        return 2.0 * self.parameters * count + 4.0 * self.attention_width * looked_at


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's peak FLOPS for dense 16-bit products, and its bandwidth from host memory."""

    name: str
    flops: float
    host_bytes_per_s: float


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("B200", 2250e12, 50e9),
        Gpu("H200", 989e12, 50e9),
        Gpu("H100", 989e12, 50e9),
        Gpu("A100", 312e12, 25e9),
        Gpu("L40S", 362e12, 25e9),
        Gpu("L4", 121e12, 25e9),
        Gpu("RTX4090", 165e12, 25e9),
    )
}


class _Config(msgspec.Struct, frozen=True):
    """The fields of a config.json that matter here."""

    num_hidden_layers: _Layers
    num_attention_heads: _Count
    hidden_size: _Count
    vocab_size: _Count
    intermediate_size: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    num_experts_per_tok: _Count | None = None
    moe_intermediate_size: _Count | None = None
    kv_lora_rank: _Count | None = None
    qk_rope_head_dim: _Count | None = None


_KNOWN = {
    "qwen2.5-0.5b": (24, 14, 2, 64, 896, 4864, 151_936),
    "qwen2.5-7b": (28, 28, 4, 128, 3584, 18_944, 152_064),
    "qwen2.5-14b": (48, 40, 8, 128, 5120, 13_824, 152_064),
    "qwen2.5-32b": (64, 40, 8, 128, 5120, 27_648, 152_064),
    "qwen2.5-72b": (80, 64, 8, 128, 8192, 29_568, 152_064),
    "qwen3-8b": (36, 32, 8, 128, 4096, 12_288, 151_936),
    "qwen3-32b": (64, 64, 8, 128, 5120, 25_600, 151_936),
    "llama-3.1-8b": (32, 32, 8, 128, 4096, 14_336, 128_256),
    "llama-3.1-70b": (80, 64, 8, 128, 8192, 28_672, 128_256),
    "mistral-7b": (32, 32, 8, 128, 4096, 14_336, 32_768),
    "glm-4-9b": (40, 32, 2, 128, 4096, 13_696, 151_552),
}
"""Layers, heads, KV heads, head dimension, hidden size, intermediate size, vocabulary; KV in 16 bits."""

SHAPE_NAMES = tuple(_KNOWN)


def shape_of(given: str, kv_dtype: str | None = None) -> Shape:
    """The shape with a known name, or from a config.json or its folder. `kv_dtype` is the dtype of the cache.

    Raises `ConfigError` with one sentence for anything else.
    """
    known = _KNOWN.get(given.lower())
    if known is not None:
        layers, heads, kv_heads, head_dim, hidden, intermediate, vocabulary = known
        config = _Config(layers, heads, hidden, vocabulary, intermediate, kv_heads, head_dim, "bfloat16")
        return _shape(given.lower(), config, kv_dtype)
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"{printable(given)} is neither a known shape ({', '.join(SHAPE_NAMES)}) nor a config.json or its folder"
        )
    return _shape(path.absolute().parent.name, _read(path), kv_dtype)


def _read(path: Path) -> _Config:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is too large to be the config of a model")
        return msgspec.json.decode(text, type=_Config)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{path} does not describe a decoder: {printable(str(error))}") from error


def _shape(name: str, config: _Config, kv_dtype: str | None) -> Shape:
    dtype = kv_dtype or config.dtype or config.torch_dtype or "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(f"the KV dtype {printable(dtype)} is unknown: use one of {', '.join(_DTYPE_BYTES)}")
    head_dim = config.head_dim or max(1, config.hidden_size // config.num_attention_heads)
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    kv_width = 2 * kv_heads * head_dim
    if config.kv_lora_rank is not None:
        kv_width = config.kv_lora_rank + (config.qk_rope_head_dim or 0)
    width = config.num_attention_heads * head_dim
    products = 3 * config.intermediate_size
    if config.moe_intermediate_size is not None:
        products = 3 * config.moe_intermediate_size * (config.num_experts_per_tok or 1)
    parameters = config.num_hidden_layers * config.hidden_size * (2 * width + kv_width + products)
    return Shape(
        name=name,
        kv_bytes=config.num_hidden_layers * kv_width * _DTYPE_BYTES[dtype],
        parameters=float(parameters),
        attention_width=config.num_hidden_layers * width,
    )
