"""Which policy a pool has, by the name that settings know it by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from kvtier.blocks.adaptive_policy import AdaptivePolicy
from kvtier.blocks.policies import EvictionPolicy, LruPolicy
from kvtier.blocks.pool import Block

Eviction: TypeAlias = Literal["adaptive", "lru"]


def eviction_policy(eviction: Eviction, *, declines: bool, clock: Callable[[], float]) -> EvictionPolicy[Block]:
    """With `declines`, blocks that are worth less than what they would replace need not be stored."""
    return LruPolicy() if eviction == "lru" else AdaptivePolicy(declines=declines, clock=clock)
