"""Tiny checkpoints of models whose layers look back differently, made with transformers: what vLLM keeps in groups."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from kvtier.testing.tiny_models import VOCAB_SIZE

WINDOW_TOKENS = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    # Windows beside full attention: Gemma 3.
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    # Windows in all layers: the first Mistral.
    "mistral": (
        "Mistral",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": WINDOW_TOKENS,
        },
    ),
    # Chunks beside full attention, without experts: Llama 4.
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW_TOKENS,
            "no_rope_layers": [1, 1, 1, 0],
            "interleave_moe_layer_step": 1000,
            "num_local_experts": 2,
        },
    ),
    # Latents: DeepSeek V2. vLLM's kernel for CPUs knows no smaller ones.
    "deepseek": (
        "DeepseekV2",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
        },
    ),
    # States beside full attention, as in Qwen3.5 and its successors: gated DeltaNet, with experts.
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "dtype": "bfloat16",
        },
    ),
    # States beside full attention: the short convolutions of LFM2. On CPUs, vLLM's Mamba does not run with a prefix
    # cache.
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "block_dim": 128,
        },
    ),
}


@functools.cache
def group_model_folder(name: str, *, seed: int = 0) -> Path:
    """A tiny checkpoint, written once for all tests of this process."""
    folder = Path(_folder().name) / f"{name}-{seed}"
    family, settings = _MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # spread enough that other KV shows in the tokens
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvtier-vllm-groups-")
