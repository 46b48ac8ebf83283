"""Which run is oldest: by its last use alone, or by the time since then for each use that it has had.

A run that was used n times and now waits for t seconds is expected back (n - 1/2) / t times a second. So one that was
used twice is kept three times as long as one used once, and one used more often five times.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable
from typing import TypeVar

from kvtier.blocks.run import MAX_USES, Run

_Item = TypeVar("_Item")
_order = operator.attrgetter("order")
_WEIGHTS = [2.0 * num_uses - 1.0 for num_uses in range(MAX_USES + 1)]
"""By the number of uses: n - 1 returns, and half of one more that is Jeffreys' prior, in halves."""


class Rule(enum.Enum):
    """What decides which run loses blocks."""

    LRU = enum.auto()
    AGE_PER_USE = enum.auto()
    WORTH = enum.auto()


def oldest(runs: Iterable[Run[_Item]], rule: Rule, now: float) -> Run[_Item]:
    """The oldest of `runs`, of which there must be one, by either rule of age."""
    if rule is Rule.LRU:
        return min(runs, key=_order)
    return max(runs, key=lambda run: ((now - run.used_at) / _WEIGHTS[run.num_uses], -run.order))  # type: ignore[operator]
