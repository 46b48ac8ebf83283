"""Qwen3: the heads of query and key are normalised before they are rotated."""

from __future__ import annotations

from kvtier.models.model import Model


class Qwen3ForCausalLM(Model):
    """The plain decoder; that query and key are normalised is in its config."""
