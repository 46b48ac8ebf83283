"""The KV shapes of the models in the benchmarks. Bytes are random; no weights are needed."""

from __future__ import annotations

from kvtier.blocks.layout import KvLayout

SHAPES = {
    "Qwen2.5-32B": KvLayout(layers=64, kv_heads=8, head_dim=128),
    "Qwen2.5-7B": KvLayout(layers=28, kv_heads=4, head_dim=128),
    "Qwen2.5-3B": KvLayout(layers=36, kv_heads=2, head_dim=128),
    "glm-4-9b-chat-1m": KvLayout(layers=40, kv_heads=4, head_dim=128),
    "Llama-3.1-8B": KvLayout(layers=32, kv_heads=8, head_dim=128),
}

NUM_BLOCKS = 512
"""8,192 tokens in blocks of 16, as in the documents the project comes from."""
