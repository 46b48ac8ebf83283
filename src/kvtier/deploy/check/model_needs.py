"""What a model takes, found without loading it: from its config.json and the headers of its weight files. No torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.layout import DTYPE_BYTES
from kvtier.blocks.weights import MALFORMED, read_safetensors_header, tensor_range
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.models.config import CONFIG_FILE, ModelConfig, read_config
from kvtier.models.json_object import read_json_object
from kvtier.observe.printable import printable

_SCALE_BYTES = 4
_NORMS_PER_LAYER = {"Glm4ForCausalLM": 4}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """`weights_bytes` is what the weights take on the device. `note` is what people should know of its tokenizer."""

    architecture: str
    weights_bytes: int
    kv_token_bytes: int
    max_positions: int
    note: str


def read_model_facts(engine: EngineConfig) -> ModelNeeds | None:
    """None for a model of the hub that is not on this machine yet.

    Raises `ConfigError` when the engine could not load the model.
    """
    folder = _folder_of(engine)
    if folder is None:
        return None
    config = read_config(folder)
    dtype = config.dtype if engine.dtype == "auto" else engine.dtype
    stored_bytes = 0 if engine.load_format == "dummy" else _stored_bytes(folder)
    is_as_stored = stored_bytes and engine.quantization is None and dtype == config.dtype
    return ModelNeeds(
        architecture=config.architecture,
        weights_bytes=stored_bytes if is_as_stored else _computed_bytes(config, dtype, engine.quantization == "fp8"),
        kv_token_bytes=config.kv_layout(1, dtype).block_bytes,
        max_positions=config.max_position_embeddings,
        note=_tokenizer_note(folder),
    )


def _folder_of(engine: EngineConfig) -> Path | None:
    folder = Path(engine.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # of the extra `engine`
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(engine.model, CONFIG_FILE, cache_dir=engine.cache_dir, revision=engine.revision)
    except ValueError as error:
        raise ConfigError(f"{engine.model} is neither a folder nor a name on the hub") from error
    if not isinstance(found, str):
        return None
    # A download that was cut off has its config, but not its weights.
    snapshot = Path(found).parent
    return snapshot if engine.load_format == "dummy" or any(snapshot.glob("*.safetensors")) else None


def _stored_bytes(folder: Path) -> int:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors files: there are no weights to load")
    total = 0
    for path in files:
        try:
            with path.open("rb") as file:
                entries, _ = read_safetensors_header(file)
            total += sum(end - start for start, end in map(tensor_range, entries.values()))
        except (OSError, *MALFORMED) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {printable(str(error))}") from error
    return total


def _computed_bytes(config: ModelConfig, dtype: str, is_fp8: bool) -> int:
    item_bytes = DTYPE_BYTES[dtype]
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    outputs = query + 2 * kv + hidden + 2 * inner + hidden
    weights = hidden * (query + 2 * kv) + query * hidden + hidden * 2 * inner + inner * hidden
    biases = config.qkv_bias * (query + 2 * kv) + config.output_bias * hidden + config.mlp_bias * (2 * inner + hidden)
    norms = _NORMS_PER_LAYER.get(config.architecture, 2) * hidden + config.has_qk_norm * 2 * config.head_dim
    layer_bytes = (biases + norms) * item_bytes
    layer_bytes += weights + outputs * _SCALE_BYTES if is_fp8 else weights * item_bytes
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * layer_bytes + (embeddings + hidden) * item_bytes


def _tokenizer_note(folder: Path) -> str:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return "it has no tokenizer: only prompts of token ids are answered"
    if any(folder.glob("chat_template*")):
        return ""
    with contextlib.suppress(ConfigError):
        if read_json_object(folder / "tokenizer_config.json").get("chat_template"):
            return ""
    return "it has no chat template: chat requests are refused, completions work"
