"""Which neighbours of a cold block are evicted with it, so that a larger block fits in their room. No changes here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from kvtier.blocks.block import Block, BlockState
from kvtier.blocks.share import Share
from kvtier.blocks.space import Region


def is_evictable(region: Region | None) -> bool:
    return (
        isinstance(region, Block)
        and region.state is BlockState.READY
        and region.num_refs == 0
        and not region.is_pinned
        and not region.is_held
    )


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks whose eviction makes one free run, and how many more regions of the wanted size would then fit.

    `num_gained` is None if not even one would fit.
    """

    blocks: list[Block]
    num_gained: int | None


def window_around(
    victim: Block,
    size: int,
    requester: Share | None,
    may_evict: Callable[[Block, Share | None, Sequence[Block]], bool],
) -> Window:
    """The smallest window of evictable blocks around `victim` that makes room for `size`, else the largest one.

    Prefixes are written upwards and become cold from the end, so the window grows downwards first, unless the block
    there is larger than the one above: the previous call may have made room for that large block.
    """
    blocks = [victim]
    run = victim.size
    fitting_before = 0
    left, right = victim.left, victim.right

    def can_go(region: Region | None) -> TypeGuard[Block]:
        return isinstance(region, Block) and is_evictable(region) and may_evict(region, requester, blocks)

    while True:
        if left is not None and left.is_free:
            run, fitting_before, left = run + left.size, fitting_before + left.size // size, left.left
        if right is not None and right.is_free:
            run, fitting_before, right = run + right.size, fitting_before + right.size // size, right.right
        if run >= size:
            return Window(blocks, run // size - fitting_before)
        is_right_smaller = can_go(right) and left is not None and right.size < left.size
        if can_go(left) and not is_right_smaller:
            blocks.append(left)
            run, left = run + left.size, left.left
        elif can_go(right):
            blocks.append(right)
            run, right = run + right.size, right.right
        else:
            return Window(blocks, None)
