"""The model families: each is the plain decoder of `models/model` apart from its class's changes."""

from __future__ import annotations

from torch import Tensor

from kvtier.models.attention import Attention
from kvtier.models.layers import DecoderLayer, GatedMlp, RmsNorm
from kvtier.models.model import Model
from kvtier.models.recipe import Recipe
from kvtier.models.rope import Rope


class LlamaForCausalLM(Model):
    """Llama 2 and 3: the plain decoder."""


class MistralForCausalLM(Model):
    """The plain decoder; the windows of some versions are in its config, and applied by the attention."""


class Qwen2ForCausalLM(Model):
    """Qwen2 and Qwen2.5: the biases on query, key and value and the windows of some layers are in its config."""


class Qwen3ForCausalLM(Model):
    """Query and key heads are normalised before rotation, as its config says."""


class GlmDecoderLayer(DecoderLayer):
    """The plain layer with gate and up as one tensor, as GLM checkpoints hold them."""

    def make_mlp(self, recipe: Recipe) -> GatedMlp:
        return GatedMlp(recipe, is_merged=True)


class GlmForCausalLM(Model):
    """GLM-4: half of each head rotates, in neighbouring pairs; that is in its config."""

    decoder_layer = GlmDecoderLayer


class Glm4DecoderLayer(GlmDecoderLayer):
    """The outputs of attention and MLP are normalised before they join the residual stream."""

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
    """GLM-4 of 2025 (0414): GLM with a further norm after attention and after the MLP."""

    decoder_layer = Glm4DecoderLayer


MODELS: dict[str, type[Model]] = {
    model.__name__: model
    for model in (
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        LlamaForCausalLM,
        MistralForCausalLM,
        GlmForCausalLM,
        Glm4ForCausalLM,
    )
}
"""By the name that config.json gives in `architectures`; `config.ARCHITECTURES` has the same names."""


def make_model(recipe: Recipe) -> Model:
    """A model on its device, without its weights yet."""
    return MODELS[recipe.config.architecture](recipe)
