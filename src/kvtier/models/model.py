"""A decoder-only model: embedding, decoder layers, final norm, head.

`forward` and `logits` run under inference mode, never wait, and have shapes that depend only on shapes, so a CUDA graph
can capture them. The thread that runs the engine's steps calls both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvtier.models.attention import Attention
from kvtier.models.config import ModelConfig
from kvtier.models.layer import Layer
from kvtier.models.layers import DecoderLayer, Embedding, RmsNorm
from kvtier.models.linear import LinearPart, LinearShape, PlainLinear
from kvtier.models.recipe import Recipe
from kvtier.models.rope import Rope
from kvtier.models.slot import WeightSlot

_HEAD = "lm_head"


class Model(Layer):
    """A family derives from this and names its decoder layer."""

    decoder_layer: type[DecoderLayer] = DecoderLayer

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        config = recipe.config
        self.config: ModelConfig = config
        self.rope = Rope(config.rope, recipe.max_positions, recipe.device)
        self.embed_tokens = Embedding(recipe)
        self.layers = nn.ModuleList(self.decoder_layer(recipe, self.rope, layer) for layer in range(config.num_layers))
        self.norm = RmsNorm(recipe, config.hidden_size)
        self.lm_head = None if config.tie_word_embeddings else _make_head(recipe)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states (T, hidden) of `tokens` (T,) at `positions` (T,), flat over all requests of a step."""
        with torch.inference_mode():
            rope_rows = self.rope.rows(positions)
            hidden, residual = self.embed_tokens(tokens), None
            for layer in self.layers:
                hidden, residual = layer(hidden, residual, rope_rows, attention)
            return self.norm.add(hidden, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (R, vocab) of the tokens that may follow `hidden` (R, hidden), in its dtype."""
        with torch.inference_mode():
            if self.lm_head is None:
                return functional.linear(hidden, self.embed_tokens.weight)
            return self.lm_head(hidden)

    def checkpoint_slots(self) -> Iterator[WeightSlot]:
        """The place of each tensor of a checkpoint."""
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.slots(name if name.startswith(_HEAD) else f"model.{name}")

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint may contain a tensor `name` that is not needed."""
        return name.endswith(".rotary_emb.inv_freq") or (self.lm_head is None and name.startswith(f"{_HEAD}."))

    def finish_loading(self) -> None:
        """Call once, after all weights are loaded."""
        for module in self.modules():
            if isinstance(module, Layer) and module is not self:
                module.finish_loading()

    def weights_bytes(self) -> int:
        """The size of the parameters on the device."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())


def _make_head(recipe: Recipe) -> PlainLinear:
    config = recipe.config
    part = LinearPart(_HEAD, config.vocab_size)
    return PlainLinear(
        LinearShape(inputs=config.hidden_size, parts=(part,), has_bias=False, dtype=recipe.dtype, device=recipe.device)
    )
