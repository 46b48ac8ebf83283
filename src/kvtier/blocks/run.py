"""Blocks of one prompt that were last used together, and the history of their uses."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvtier.blocks.reuse_model import NEW_CLASS
from kvtier.blocks.share import Share

MAX_USES = 3
Item = TypeVar("Item")


class Scoped(Protocol):
    """A block's index: `scope` separates its hashes from those of other indexes; see `pool.PrefixIndex`."""

    scope: int
    share: Share


class Run(Generic[Item]):
    """`blocks` are in prompt order; some of them may have moved to a later run, or be in use.

    `num_live` of them may be evicted. `size` counts those not evicted since the run was made, `num_wanted` those to be
    stored at first. `used_at` is None until the run is first used; `order` is smaller for runs used earlier, and for
    the later ones of those used at once. `num_uses` counts its uses up to `MAX_USES`. `log2_gap` is a moving average
    of the logarithms of its gaps, None before the first gap. A run that `is_tail` ended its prompt: blocks stored
    behind it continue that prompt. New blocks are `is_reachable` if the blocks before them are known to be cached, and
    `is_declined` if the policy refused them room.
    """

    __slots__ = (
        "blocks",
        "gap_class",
        "is_declined",
        "is_reachable",
        "is_tail",
        "log2_gap",
        "num_live",
        "num_uses",
        "num_wanted",
        "order",
        "size",
        "used_at",
    )

    def __init__(self, gap_class: int = NEW_CLASS, log2_gap: float | None = None, num_uses: int = 1) -> None:
        self.blocks: list[Item] = []
        self.num_live = 0
        self.num_uses = num_uses
        self.num_wanted = 0
        self.size = 0
        self.used_at: float | None = None
        self.order = 0
        self.log2_gap = log2_gap
        self.gap_class = gap_class
        self.is_tail = False
        self.is_reachable = False
        self.is_declined = False
