"""Why a match ended where it did, and which of several answers explains it best. Values only: safe on any thread."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class MatchEnd(enum.Enum):
    """Why the block after a match was not a hit. The values are words for people."""

    ALL = "all"
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other namespace"
    TIER_DOWN = "tier down"
    SLOWER = "slower than computing"
    PENDING = "still pending"
    LIMIT = "lease limit"
    LOST = "lost or corrupt"

    def __str__(self) -> str:
        return self.value


_MOST_TELLING_FIRST = (
    MatchEnd.LIMIT,
    MatchEnd.PENDING,
    MatchEnd.LOST,
    MatchEnd.TIER_DOWN,
    MatchEnd.EVICTED,
    MatchEnd.NEVER_STORED,
)
"""The closer an answer is to a hit, the more it explains: the block is present, will be, was until it was read, may be,
was once, never was. So a damaged block is distinguished from a miss. A tier that is down outranks an eviction
elsewhere: a small tier evicts all the time, while the tier that is down may still have the block."""


def most_telling(ends: Iterable[MatchEnd]) -> MatchEnd:
    """The best explanation among several tiers' answers on a missing block. Without any, it was never stored."""
    seen = set(ends)
    return next((end for end in _MOST_TELLING_FIRST if end in seen), MatchEnd.NEVER_STORED)
