"""The marks around a model's thoughts before its answer. No torch: the API uses them too."""

from __future__ import annotations

THOUGHT_BEGIN = "<think>"
THOUGHT_END = "</think>"


def ends_in_thought(prompt_end: str) -> bool:
    """Whether the answer to a prompt with this end begins as a thought."""
    return prompt_end.rstrip().endswith(THOUGHT_BEGIN)
