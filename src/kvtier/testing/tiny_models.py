"""Tiny checkpoints of every family, made with transformers, and a tiny tokenizer, for tests to load instead of a model.

`save_tiny_model` writes the files of a hub download: config.json, generation_config.json, safetensors and a tokenizer.
The same arguments write the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT = "<|end|>"
ROLE = "<|role|>"
VOCAB_SIZE = 320

_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("o", "n"), ("e", "r"), ("a", "n"), ("h", "e")]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|role|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Family:
    config: type
    model: type
    settings: dict[str, Any]


_FAMILIES = {
    "qwen2": _Family(Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": _Family(Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": _Family(LlamaConfig, LlamaForCausalLM, {}),
    "mistral": _Family(MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "glm": _Family(GlmConfig, GlmForCausalLM, {}),
    "glm4": _Family(Glm4Config, Glm4ForCausalLM, {}),
}

FAMILIES = tuple(_FAMILIES)
"""Every family that `save_tiny_model` knows."""


def make_tiny_model(family: str, *, num_layers: int = 2, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of `family` in float32; `overrides` are fields of its config."""
    kind = _FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 256,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **kind.settings,
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.model(kind.config(**settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _randomize(name, parameter)
    model.eval()
    return model  # type: ignore[no-any-return]


def save_tiny_model(
    folder: Path,
    family: str,
    *,
    num_layers: int = 2,
    seed: int = 0,
    max_shard_size: str | int = "1GB",
    with_tokenizer: bool = True,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a model of `make_tiny_model` to `folder` and return it; a small `max_shard_size` makes several shards."""
    model = make_tiny_model(family, num_layers=num_layers, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if with_tokenizer:
        make_tiny_tokenizer().save_pretrained(folder)
    return model


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: ids 0 to 255 are the bytes, then the two special tokens, then a few merges. Encodes any text."""
    alphabet = _byte_characters()
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    merged = [left + right for left, right in _MERGES]
    vocabulary |= {token: 258 + number for number, token in enumerate(merged)}
    vocabulary |= {END_OF_TEXT: 256, ROLE: 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        additional_special_tokens=[ROLE],
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=512,
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _randomize(name: str, parameter: torch.Tensor) -> None:
    """Randomize a parameter, with enough spread that a wrong norm, bias or rotation shows in the logits."""
    if "norm" in name:
        parameter.uniform_(0.5, 1.5)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.5)
    else:
        parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
