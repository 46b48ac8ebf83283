"""Make a model folder with the shape of a real model, for speed: its weights are random, made when it is loaded.

    python -m examples.use_remote_KV_cache.make_model --shape small --folder small-model

Its tokenizer has one token per character. Serve it with `load_format: dummy`. For answers in words use examples/model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.model_configs import MODEL_CONFIGS
from examples.use_remote_KV_cache.ascii_tokenizer import VOCAB_SIZE, make_ascii_tokenizer
from examples.use_remote_KV_cache.command import run_command

SHAPES: dict[str, dict[str, object]] = {
    "small": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
    "glm-4-9b": dict(MODEL_CONFIGS["glm-4-9b-chat-1m"]),
    "qwen2.5-7b": dict(MODEL_CONFIGS["Qwen2.5-7B"]),
}


def make_model(folder: Path, shape: str) -> None:
    """An existing folder is an error: nothing is overwritten."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    max_tokens = SHAPES[shape]["max_position_embeddings"]
    assert isinstance(max_tokens, int)
    make_ascii_tokenizer(max_tokens).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already")
    make_model(arguments.folder, arguments.shape)
    print(f"{arguments.folder}: the shape of {arguments.shape}, for load_format: dummy")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
