"""Mistral: Llama with, in some versions, a window in every layer."""

from __future__ import annotations

from kvtier.models.model import Model


class MistralForCausalLM(Model):
    """The plain decoder; windows are the attention's to apply and in its config."""
