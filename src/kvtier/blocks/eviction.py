"""A pool's eviction policy, by its name in the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from kvtier.blocks.adaptive_policy import AdaptivePolicy
from kvtier.blocks.block import Block
from kvtier.blocks.policies import EvictionPolicy, LruPolicy

Eviction: TypeAlias = Literal["adaptive", "lru"]


def eviction_policy(eviction: Eviction, *, declines: bool, clock: Callable[[], float]) -> EvictionPolicy[Block]:
    """Make a policy. With `declines`, it may refuse to store blocks worth less than those they would replace."""
    return LruPolicy() if eviction == "lru" else AdaptivePolicy(declines=declines, clock=clock)
