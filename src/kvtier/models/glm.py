"""GLM-4 as `GlmForCausalLM`: half of each head rotates, in neighbouring pairs; gate and up are one tensor."""

from __future__ import annotations

from kvtier.models.layers import DecoderLayer, GatedMlp
from kvtier.models.model import Model
from kvtier.models.recipe import Recipe


class GlmDecoderLayer(DecoderLayer):
    """The plain layer with the MLP as GLM checkpoints hold it."""

    def make_mlp(self, recipe: Recipe) -> GatedMlp:
        return GatedMlp(recipe, is_merged=True)


class GlmForCausalLM(Model):
    """The plain decoder over `GlmDecoderLayer`; the rotation is in its config."""

    decoder_layer = GlmDecoderLayer
