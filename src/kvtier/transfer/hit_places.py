"""Where cached tokens came from, as plug-ins count them: a server's memory, its disk, a cluster below it, or TCP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from kvtier.memory.lease import DISK
from kvtier.transfer.load_news import Loaded

Place: TypeAlias = Literal["memory", "disk", "cluster", "tcp"]
_SERVER = "server"
_PLACES: dict[str, Place] = {_SERVER: "memory", DISK: "disk", "cluster": "cluster"}


def tokens_by_tier(in_memory: int, num_tokens: int, stored_in: str) -> dict[str, int]:
    """Splits a server's `num_tokens`: `in_memory` of them are in its memory, the rest in `stored_in`."""
    others = {DISK: 0, stored_in: num_tokens - in_memory}
    return {_SERVER: in_memory, **{tier: count for tier, count in others.items() if count or tier == DISK}}


def named_parts(parts: Sequence[Loaded], stored_in: str) -> list[Loaded]:
    """The parts of a load, with `stored_in` as the tier of what the server had to read: only the match knows it."""
    return [replace(part, tier=stored_in) if part.tier == DISK else part for part in parts]


def place_of(tier: str) -> Place:
    """How loads from a tier are counted. A server reached over TCP counts as "tcp", whatever is below it."""
    return _PLACES.get(tier, "tcp")
