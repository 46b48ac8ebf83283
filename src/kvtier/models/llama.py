"""Llama 2 and 3."""

from __future__ import annotations

from kvtier.models.model import Model


class LlamaForCausalLM(Model):
    """The plain decoder."""
