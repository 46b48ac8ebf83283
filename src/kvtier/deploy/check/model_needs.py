"""A model's requirements, found without loading it: from its config.json and the headers of its weight files. No torch.

Its tokenizer is loaded if transformers is installed; code that comes with a checkpoint is not run.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.layout import DTYPE_BYTES
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError, RequestError
from kvtier.models.config import CONFIG_FILE, ModelConfig, read_config
from kvtier.models.json_object import read_json_object
from kvtier.models.weight_files import has_all_files, read_stored_tensors
from kvtier.observe.printable import printable

_SCALE_BYTES = 4
_NORMS_PER_LAYER = {"Glm4ForCausalLM": 4}
_DATE_FUNCTION = "strftime_now"
_MAX_TEMPLATES = 16
_LONGEST_REASON = 300
_MAX_TEMPLATE_CHARACTERS = 1 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """`weights_bytes` is the size of the weights on the device. `note` tells users about its tokenizer."""

    architecture: str
    weights_bytes: int
    kv_token_bytes: int
    max_positions: int
    note: str


def read_model_needs(engine: EngineConfig) -> ModelNeeds | None:
    """None for a model of the hub that is not on this machine yet.

    Raises `ConfigError` if the engine could not load the model.
    """
    folder = _folder_of(engine)
    if folder is None:
        return None
    config = read_config(folder)
    template_problem = _load_tokenizer(engine, folder)
    dtype = config.dtype if engine.dtype == "auto" else engine.dtype
    is_dummy = engine.load_format == "dummy"
    stored_bytes = 0 if is_dummy else sum(tensor.nbytes for tensor in read_stored_tensors(folder).values())
    is_as_stored = stored_bytes and engine.quantization is None and dtype == config.dtype
    return ModelNeeds(
        architecture=config.architecture,
        weights_bytes=stored_bytes if is_as_stored else _computed_bytes(config, dtype, engine.quantization == "fp8"),
        kv_token_bytes=config.kv_layout(1, dtype).block_bytes,
        max_positions=config.max_position_embeddings,
        note=template_problem or _tokenizer_note(folder),
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
    # An interrupted download has its config, but not its weights.
    snapshot = Path(found).parent
    return snapshot if engine.load_format == "dummy" or has_all_files(snapshot) else None


def _load_tokenizer(engine: EngineConfig, folder: Path) -> str:
    """The problem with its chat template, if any. Raises `ConfigError` if the tokenizer cannot be loaded."""
    if engine.trust_remote_code:  # its tokenizer may have code of its own
        return ""
    try:
        from kvtier.models.tokenizer import Tokenizer  # noqa: PLC0415  # of the extra `engine`, and takes seconds
    except ImportError:
        return ""
    tokenizer = Tokenizer(folder)
    if tokenizer.is_absent or not tokenizer.chat_template:
        return ""
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    except RequestError as error:
        reason = str(error).partition(": ")[2] or str(error)
        refused = "its chat template cannot be rendered for a user's message: such chats are refused"
        return f"{refused} ({printable(reason, _LONGEST_REASON)})"
    return ""


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
    template = _chat_template(folder)
    if not template:
        return "it has no chat template: chat requests are refused, completions work"
    if _DATE_FUNCTION in template:
        return f"its chat template writes the current date ({_DATE_FUNCTION}): prompts part when that changes"
    return ""


def _chat_template(folder: Path) -> str:
    """The parts of it that matter here; of several templates, all."""
    found = ""
    for path in sorted(folder.glob("chat_template*"))[:_MAX_TEMPLATES]:
        with contextlib.suppress(OSError), path.open(errors="replace") as file:
            found += file.read(_MAX_TEMPLATE_CHARACTERS) or path.name
    with contextlib.suppress(ConfigError):
        found += str(read_json_object(folder / "tokenizer_config.json").get("chat_template") or "")
    return found
