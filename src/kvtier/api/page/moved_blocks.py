"""Bytes that a cache server has moved, made of the blocks that it counts. Used by one thread at a time.

A server counts blocks that it found and stored, and that its disk read and wrote, but not their bytes: clients on its
host read its memory themselves. Each block counts as many bytes as one has there on average when it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Move(NamedTuple):
    """Into ("in") or out of ("out") a tier. `owner` is empty where only the sum over all of that name is known."""

    direction: str
    tier: str
    owner: str = ""


_COUNTED = {
    ("in", "memory"): "stored_blocks",
    ("out", "memory"): "hit_blocks",
    ("in", "disk"): "disk_written_blocks",
    ("out", "disk"): "disk_read_blocks",
}
_HELD = {"memory": ("used_bytes", "blocks"), "disk": ("disk_used_bytes", "disk_blocks")}


class MovedBlocks:
    """Of the server `owner`, since the first look at it, also over its restarts."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._counts: dict[str, float] = {}
        self._bytes: dict[Move, float] = {}
        self._block_bytes: dict[str, float] = {}

    def take(self, stats: Mapping[str, object]) -> dict[Move, float]:
        """All bytes so far, with what `stats` has more than those before."""
        for tier, (held_bytes, blocks) in _HELD.items():
            if count := _number(stats, blocks):
                self._block_bytes[tier] = _number(stats, held_bytes) / count
        for (direction, tier), name in _COUNTED.items():
            if name not in stats:
                continue
            now = _number(stats, name)
            before = self._counts.get(name, now)
            move = Move(direction, tier, self._owner)
            fresh = now - before if now >= before else now  # it was started again
            self._bytes[move] = self._bytes.get(move, 0.0) + fresh * self._block_bytes.get(tier, 0.0)
            self._counts[name] = now
        return dict(self._bytes)


def _number(stats: Mapping[str, object], name: str) -> float:
    value = stats.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0.0
