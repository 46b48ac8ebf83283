"""The content of config.json for the shapes that engines are measured with. Weights are random; no files are needed."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ModelShape = Mapping[str, object]


def _qwen2(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: object) -> ModelShape:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        **others,
    }


SMALL_SHAPE = "small"
"""Two cores serve some prompts of a thousand tokens a second. In float32, which is the fastest on CPUs."""

MODEL_CONFIGS: dict[str, ModelShape] = {
    SMALL_SHAPE: _qwen2(
        hidden=256,
        intermediate=768,
        layers=4,
        heads=4,
        kv_heads=2,
        vocab_size=8192,
        tie_word_embeddings=True,
        torch_dtype="float32",
    ),
    "Qwen2.5-0.5B": _qwen2(
        hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-3B": _qwen2(
        hidden=2048, intermediate=11008, layers=36, heads=16, kv_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-7B": _qwen2(
        hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocab_size=152064, tie_word_embeddings=False
    ),
    "Qwen2.5-32B": _qwen2(
        hidden=5120, intermediate=27648, layers=64, heads=40, kv_heads=8, vocab_size=152064, tie_word_embeddings=False
    ),
    "glm-4-9b-chat-1m": {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "attention_bias": True,
        "max_position_embeddings": 1048576,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 100000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151552,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}


@contextlib.contextmanager
def model_folder(shape: str, **others: object) -> Iterator[str]:
    """A temporary folder with the config.json of `shape`, for `load_format="dummy"`: no weights, no tokenizer.

    `others` are additional fields.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**MODEL_CONFIGS[shape], **others}))
        yield folder
