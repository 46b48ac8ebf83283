"""Reasoning efforts of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

THINKS: Mapping[str | None, bool] = {"none": False, **dict.fromkeys(EFFORTS[2:], True)}
"""Whether an effort turns thinking on or off; "minimal" leaves this to the model."""
