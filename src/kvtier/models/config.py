"""A model's properties, read from the config.json of its checkpoint. Pure Python: reading a config imports no torch.

Families differ in a few traits that their config.json does not contain (Qwen2 has biases on query, key and value, Qwen3
normalises query and key); these are in the table `_TRAITS`, and a `ModelConfig` has them filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.blocks.layout import DTYPE_BYTES, KvLayout
from kvtier.errors import ConfigError
from kvtier.models.foreign_files import refuse_gguf_folder
from kvtier.models.json_object import JsonObject, read_json_object
from kvtier.models.quantization.config import GptqConfig, read_quantization
from kvtier.models.rope_config import RopeConfig, read_rope
from kvtier.observe.printable import printable

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_WINDOW = 4096
_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """Properties that a family's config.json leaves out. None for a bias: the config's `attention_bias` decides."""

    qkv_bias: bool | None = False
    output_bias: bool | None = False
    has_qk_norm: bool = False
    is_interleaved: bool = False
    partial_rotary_factor: float = 1.0
    head_dim: int | None = None
    attention_bias: bool = False


_GLM = _Traits(qkv_bias=None, is_interleaved=True, partial_rotary_factor=0.5, head_dim=128, attention_bias=True)

_TRAITS = {
    "Qwen2ForCausalLM": _Traits(qkv_bias=True),
    "Qwen3ForCausalLM": _Traits(qkv_bias=None, output_bias=None, has_qk_norm=True, head_dim=128),
    "LlamaForCausalLM": _Traits(qkv_bias=None, output_bias=None),
    "MistralForCausalLM": _Traits(),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
}

ARCHITECTURES = tuple(_TRAITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model. `windows[layer]` is how many tokens a query of that layer sees, including itself; None is all.

    `dtype` is that of the saved checkpoint. `eos_token_ids` are all ids that end an answer, those of
    generation_config.json first.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: GptqConfig | None = None

    def kv_layout(self, block_tokens: int = 16, dtype: str | None = None) -> KvLayout:
        """The shape of a block of this model; `dtype` is that of the KV, by default the checkpoint's."""
        return KvLayout(
            layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype if dtype is None else dtype,
            block_tokens=block_tokens,
        )

    def kv_identity(self) -> dict[str, object]:
        """The fields that change what the KV of a token is, as plain JSON, for the namespace."""
        fields = asdict(self)
        for name in ("dtype", "bos_token_id", "eos_token_ids", "tie_word_embeddings", "max_position_embeddings"):
            del fields[name]
        return fields


def read_config(source: Path | Mapping[str, Any]) -> ModelConfig:
    """The config of a model folder (with generation_config.json, if present) or of a config.json's content.

    Raises `ConfigError`, naming file and field, if something is missing, malformed or unknown.
    """
    if isinstance(source, Mapping):
        return _parse(JsonObject(source, "the model config"), JsonObject({}, ""))
    path = source / CONFIG_FILE
    if not source.is_dir():
        raise ConfigError(f"there is no model folder {source}")
    if not path.is_file():
        refuse_gguf_folder(source)
        raise ConfigError(f"{source} has no {CONFIG_FILE}")
    generation = source / GENERATION_CONFIG_FILE
    return _parse(
        JsonObject(read_json_object(path), str(path)),
        JsonObject(read_json_object(generation) if generation.is_file() else {}, str(generation)),
    )


def _parse(fields: JsonObject, generation: JsonObject) -> ModelConfig:
    architecture = _architecture(fields)
    traits = _TRAITS[architecture]
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.wrong("hidden_act", "silu", activation)
    hidden_size = fields.count("hidden_size", most=_MAX_WIDTH)
    num_heads = fields.count("num_attention_heads", most=_MAX_WIDTH)
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.count("head_dim", traits.head_dim or max(hidden_size // num_heads, 1), most=_MAX_WIDTH)
    num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
    max_positions = fields.count("max_position_embeddings")
    rope = read_rope(
        fields,
        head_dim=head_dim,
        max_positions=max_positions,
        is_interleaved=traits.is_interleaved,
        partial_factor=traits.partial_rotary_factor,
    )
    attention_bias = fields.flag("attention_bias", traits.attention_bias)
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=fields.number("rms_norm_eps"),
        rope=rope,
        max_position_embeddings=max(max_positions, rope.max_positions),
        windows=_windows(fields, architecture, num_layers),
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        output_bias=attention_bias if traits.output_bias is None else traits.output_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        has_qk_norm=traits.has_qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys((*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id")))),
        quantization=read_quantization(fields),
    )


def _architecture(fields: JsonObject) -> str:
    names = fields.texts("architectures")
    if not names:
        raise ConfigError(f"{fields.where}: architectures is empty")
    if names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.where}: the architecture {printable(names[0])} is not known; known are {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _dtype(fields: JsonObject) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if dtype not in COMPUTE_DTYPES or dtype not in DTYPE_BYTES:
        raise fields.wrong("dtype", f"one of {', '.join(COMPUTE_DTYPES)}", dtype)
    return dtype


def _windows(fields: JsonObject, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    is_qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    has_windows = fields.flag("use_sliding_window", False) if is_qwen else architecture == "MistralForCausalLM"
    # An absent window means the family's 4096; null means none.
    if not has_windows or fields.values.get("sliding_window", _DEFAULT_WINDOW) is None:
        return (None,) * num_layers
    window = fields.count("sliding_window", _DEFAULT_WINDOW)
    if not fields.has("layer_types"):
        first = fields.index("max_window_layers", 28) if is_qwen else 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise fields.wrong("layer_types", f"{num_layers} of sliding_attention or full_attention", list(kinds))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
