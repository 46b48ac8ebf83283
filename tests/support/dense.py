"""A dense attention for one sequence, written for clarity: what models run on in these tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier.kernels.rotation import Rotation, rotate
from kvtier.models.config import ModelConfig
from kvtier.models.model import Model


class DenseAttention:
    """Keeps all keys and values of one sequence per layer; tokens come in order, any number at a time."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.keys: list[Tensor | None] = [None] * config.num_layers
        self.values: list[Tensor | None] = [None] * config.num_layers

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation) -> Tensor:
        query, key = rotate(query, key, rotation)
        keys = key if self.keys[layer] is None else torch.cat((self.keys[layer], key))
        values = value if self.values[layer] is None else torch.cat((self.values[layer], value))
        self.keys[layer], self.values[layer] = keys, values
        num_groups = self.config.num_heads // self.config.num_kv_heads
        keys, values = keys.repeat_interleave(num_groups, dim=1), values.repeat_interleave(num_groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * self.config.head_dim**-0.5
        at_key = torch.arange(keys.shape[0])
        at_query = at_key[-query.shape[0] :, None]
        hidden = at_key > at_query
        window = self.config.windows[layer]
        if window is not None:
            hidden = hidden | (at_query - at_key >= window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype).flatten(1)


def all_logits(model: Model, tokens: Tensor) -> Tensor:
    """Logits after each of `tokens` (T,), computed in one step."""
    hidden = model(tokens, torch.arange(len(tokens)), DenseAttention(model.config))
    return model.logits(hidden).float()


def greedy(model: Model, tokens: Tensor, count: int) -> list[int]:
    """`count` more tokens: one step for the prompt, then one for each token."""
    attention = DenseAttention(model.config)
    answer: list[int] = []
    step, position = tokens, 0
    for _ in range(count):
        positions = torch.arange(position, position + len(step))
        hidden = model(step, positions, attention)
        position += len(step)
        answer.append(int(model.logits(hidden[-1:]).argmax()))
        step = torch.tensor(answer[-1:])
    return answer
