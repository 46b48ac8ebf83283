"""The room in a cache for what is to stay, from the statistics of its server."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.blocks.prompt_share import prompt_share

_UNKNOWN_BYTES = 1 << 62
"""The room of a tenant without a quota, which shares what other tenants leave: filling it shows what there is."""


@dataclass(frozen=True, slots=True)
class Room:
    """Room in a cache's slowest tier, where blocks stay longest: free bytes, and those that one prompt can have.

    `pinnable_bytes` may still be pinned in memory; None if pins have no limit there.
    """

    level: str
    free_bytes: int
    usable_bytes: int
    pinnable_bytes: int | None = None


def room_of(stats: dict[str, object]) -> Room:
    """Room on the disk, or in memory without a disk; a tenant of the server has the room of its quotas."""
    pinnable = _whole(stats, "pinnable_bytes") if "pinnable_bytes" in stats else None
    if "tenant" in stats:
        return _tenants_room(stats, pinnable)
    if stats.get("disk_up"):
        space = _whole(stats, "disk_file_space_bytes")
        return Room("disk", space - _whole(stats, "disk_used_bytes"), space, pinnable)
    memory = _whole(stats, "memory_bytes")
    usable = memory - _whole(stats, "pinned_bytes")
    if "cluster_nodes_up" not in stats:
        usable = min(usable, prompt_share(memory))
    return Room("memory", _whole(stats, "free_bytes"), usable, pinnable)


def _tenants_room(stats: dict[str, object], pinnable: int | None) -> Room:
    disk, memory = _whole(stats, "disk_quota_bytes"), _whole(stats, "quota_bytes")
    if not memory:
        return Room("memory", _UNKNOWN_BYTES, _UNKNOWN_BYTES, pinnable)
    if disk:
        return Room("disk", disk - _whole(stats, "disk_used_bytes"), disk, pinnable)
    return Room("memory", memory - _whole(stats, "used_bytes"), memory - _whole(stats, "pinned_bytes"), pinnable)


def _whole(stats: dict[str, object], name: str) -> int:
    found = stats.get(name)
    return int(found) if isinstance(found, (int, float)) else 0
