"""The eviction policy of a server's memory above a disk, by its name in the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvtier.blocks.block import Block
from kvtier.blocks.eviction import Eviction
from kvtier.blocks.policies import EvictionPolicy
from kvtier.cacheserver.disk_aware_lru import DiskAwareLru
from kvtier.cacheserver.disk_aware_policy import DiskAwarePolicy

Policy: TypeAlias = EvictionPolicy[Block]


def memory_policy(
    eviction: Eviction, clock: Callable[[], float], *, evicts_unsafe: bool, on_unsafe: Callable[[Block], None]
) -> Policy:
    """A policy that declines no block: a declined block would not reach the disk, which has more room.

    `on_unsafe` is called with each block evicted before it was written.
    """
    if eviction == "lru":
        return DiskAwareLru(evicts_unsafe=evicts_unsafe, on_unsafe=on_unsafe)
    return DiskAwarePolicy(evicts_unsafe=evicts_unsafe, on_unsafe=on_unsafe, clock=clock)
