"""GLM-4 of 2025 (0414) as `Glm4ForCausalLM`: GLM with a norm after attention and after the MLP too."""

from __future__ import annotations

from torch import Tensor

from kvtier.models.attention import Attention
from kvtier.models.glm import GlmDecoderLayer
from kvtier.models.layers import RmsNorm
from kvtier.models.model import Model
from kvtier.models.recipe import Recipe
from kvtier.models.rope import Rope


class Glm4DecoderLayer(GlmDecoderLayer):
    """What attention and MLP return is normalised before it joins the residual stream."""

    def __init__(self, recipe: Recipe, rope: Rope, layer: int) -> None:
        super().__init__(recipe, rope, layer)
        self.post_self_attn_layernorm = RmsNorm(recipe, recipe.config.hidden_size)
        self.post_mlp_layernorm = RmsNorm(recipe, recipe.config.hidden_size)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rope_rows: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.post_self_attn_layernorm(self.self_attn(hidden, rope_rows, attention))
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.post_mlp_layernorm(self.mlp(hidden)), residual


class Glm4ForCausalLM(Model):
    """The plain decoder over `Glm4DecoderLayer`."""

    decoder_layer = Glm4DecoderLayer
