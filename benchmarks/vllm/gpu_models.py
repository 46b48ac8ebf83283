"""Checkpoints of real shapes with random weights, for vLLM on a GPU. Run as a program, it writes one:

python -m benchmarks.vllm.gpu_models SHAPE FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.model_configs import MODEL_CONFIGS

DENSE = "Qwen2.5-7B"
FEW_LAYERS = "Qwen2.5-7B, 2 layers"
HYBRID = "Qwen3.5-9B, 8 layers"
SMALL = "small"

_QWEN3_5: Mapping[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "vocab_size": 248320,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_CONFIGS: Mapping[str, Mapping[str, object]] = {
    DENSE: MODEL_CONFIGS[DENSE],
    FEW_LAYERS: {**MODEL_CONFIGS[DENSE], "num_hidden_layers": 2, "max_window_layers": 2},
    HYBRID: _QWEN3_5,
    SMALL: {**MODEL_CONFIGS[SMALL], "max_position_embeddings": 32768},
}

_SPREAD = 0.6
"""Spread of the lengths of the vocabulary's rows: some stand out, so that rounding does not change the best token."""


def vocab_size(shape: str) -> int:
    return int(str(_CONFIGS[shape]["vocab_size"]))


def kv_bytes_per_token(shape: str) -> int:
    """Of full attention."""
    config: Mapping[str, Any] = _CONFIGS[shape]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    itemsize = 4 if config["torch_dtype"] == "float32" else 2
    return int(2 * itemsize * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def write_model(shape: str, folder: Path) -> Path:
    """Write it in another process, so that this one holds no GPU memory."""
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.vllm.gpu_models", shape, str(folder)], check=True)
    return folder


def _write(shape: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(_CONFIGS[shape]))
    config = transformers.AutoConfig.from_pretrained(folder)
    config_file.unlink()  # it comes back with the weights
    torch.manual_seed(7)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        models: Any = transformers.AutoModelForCausalLM
        model = models.from_config(config, dtype=config.dtype)
        head = model.get_output_embeddings().weight
        with torch.no_grad():
            head.mul_(torch.exp(_SPREAD * torch.randn(head.shape[0], 1)).to(head.dtype))
    model.save_pretrained(folder)


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
