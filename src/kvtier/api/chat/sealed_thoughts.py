"""Thoughts in a form that clients carry from turn to turn without looking inside. They are not encrypted."""

from __future__ import annotations

import base64
import binascii

_BEGINNING = "kvtier:"


def sealed(thought: str) -> str:
    return _BEGINNING + base64.b64encode(thought.encode(errors="replace")).decode()


def unsealed(content: str) -> str:
    """The thought inside; empty for what another server has sealed."""
    if not content.startswith(_BEGINNING):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_BEGINNING), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
