"""How blocks leave a server's memory above a disk, by the name that settings know it by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.pool import Block
from kvtier.cacheserver.disk_aware_lru import DiskAwareLru
from kvtier.cacheserver.disk_aware_policy import DiskAwarePolicy

Policy: TypeAlias = EvictionPolicy[Block]


def memory_policy(
    eviction: Eviction, clock: Callable[[], float], *, evicts_unsafe: bool, on_unsafe: Callable[[Block], None]
) -> Policy:
    """Such memory takes all that comes, since what it declines would not get to the disk, which has more room.

    `on_unsafe` hears of what goes before it was written.
    """
    if eviction == "lru":
        return DiskAwareLru(evicts_unsafe=evicts_unsafe, on_unsafe=on_unsafe)
    return DiskAwarePolicy(evicts_unsafe=evicts_unsafe, on_unsafe=on_unsafe, clock=clock)
