"""Which class runs which architecture."""

from __future__ import annotations

from kvtier.models.glm import GlmForCausalLM
from kvtier.models.glm4 import Glm4ForCausalLM
from kvtier.models.llama import LlamaForCausalLM
from kvtier.models.mistral import MistralForCausalLM
from kvtier.models.model import Model
from kvtier.models.qwen2 import Qwen2ForCausalLM
from kvtier.models.qwen3 import Qwen3ForCausalLM
from kvtier.models.recipe import Recipe

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
    """A model on its device whose weights are still to come."""
    return MODELS[recipe.config.architecture](recipe)
