"""Reasoning in a form that clients pass from turn to turn without reading it. It is encoded, not encrypted."""

from __future__ import annotations

import base64
import binascii

_BEGINNING = "kvtier:"


def sealed(thought: str) -> str:
    return _BEGINNING + base64.b64encode(thought.encode(errors="replace")).decode()


def unsealed(content: str) -> str:
    """The reasoning inside; empty if another server has sealed it."""
    if not content.startswith(_BEGINNING):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_BEGINNING), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
