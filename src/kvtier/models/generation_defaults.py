"""The makers' sampling defaults for a model: the sampling fields of its generation_config.json. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from kvtier.models.config import GENERATION_CONFIG_FILE

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(folder: Path | None) -> dict[str, float | int]:
    """By the names of sampling parameters; empty if there is no readable file."""
    if folder is None:
        return {}
    try:
        document = json.loads((folder / GENERATION_CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    found = {name: document.get(name) for name in _NAMES}
    return {
        name: value for name, value in found.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
