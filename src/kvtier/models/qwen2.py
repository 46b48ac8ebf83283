"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from kvtier.models.model import Model


class Qwen2ForCausalLM(Model):
    """The plain decoder; the biases and the windows of some layers are in its config."""
