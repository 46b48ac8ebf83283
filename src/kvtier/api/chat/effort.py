"""How much a model is to think, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Mapping

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

THINKS: Mapping[str | None, bool] = {"none": False, **dict.fromkeys(EFFORTS[2:], True)}
"""What an effort says of thinking at all; of the least one, nothing."""
