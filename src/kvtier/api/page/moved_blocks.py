"""Estimates the bytes that a cache server has moved from its counts of blocks. Used by one thread at a time.

A server counts blocks that it finds and stores, and blocks that its disk reads and writes, but not their bytes: clients
on its host read its memory directly. Each block counts with the average block size in its tier at that time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Move(NamedTuple):
    """Into ("in") or out of ("out") a tier. `owner` is empty for a sum over all tiers of that name."""

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
    """Bytes moved by the server `owner` since its first reading, restarts included."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._counts: dict[str, float] = {}
        self._bytes: dict[Move, float] = {}
        self._block_bytes: dict[str, float] = {}

    def take(self, stats: Mapping[str, object]) -> dict[Move, float]:
        """All bytes so far, including those since the previous `stats`."""
        for tier, (held_bytes, blocks) in _HELD.items():
            if count := _number(stats, blocks):
                self._block_bytes[tier] = _number(stats, held_bytes) / count
        for (direction, tier), name in _COUNTED.items():
            if name not in stats:
                continue
            now = _number(stats, name)
            before = self._counts.get(name, now)
            move = Move(direction, tier, self._owner)
            fresh = now - before if now >= before else now  # the server has restarted
            self._bytes[move] = self._bytes.get(move, 0.0) + fresh * self._block_bytes.get(tier, 0.0)
            self._counts[name] = now
        return dict(self._bytes)


def _number(stats: Mapping[str, object], name: str) -> float:
    value = stats.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0.0
