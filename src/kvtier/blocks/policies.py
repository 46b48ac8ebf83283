"""Which block goes first when room is needed. A policy sees only blocks that may be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.share import Share

Item = TypeVar("Item")


class EvictionPolicy(Protocol[Item]):
    """An order among evictable blocks. Called only by the pool that owns it, under that pool's lock.

    `add` says a block has just been used and may be evicted from now on; `remove` that it may not; `pop_coldest`
    takes out the next victim, or answers None when there is none; `put_back` undoes pops, coldest first. `requester`
    is whose block needs the room; of a pool that only one owner uses it says nothing.
    """

    counts_shares: bool
    """The pool counts what each share uses."""

    def add(self, block: Item) -> None: ...

    def remove(self, block: Item) -> None: ...

    def pop_coldest(self, requester: Share | None = None) -> Item | None: ...

    def put_back(self, blocks: Sequence[Item]) -> None: ...

    def may_evict(self, block: Item, requester: Share | None, victims: Sequence[Item]) -> bool:
        """Whether `block` may go as well, besides `victims`, though it is not the coldest."""
        ...

    def __len__(self) -> int: ...


class LruPolicy(Generic[Item]):
    """Least recently used first."""

    counts_shares = False

    def __init__(self) -> None:
        self._order: OrderedDict[Item, None] = OrderedDict()

    def add(self, block: Item) -> None:
        self._order[block] = None

    def remove(self, block: Item) -> None:
        del self._order[block]

    def pop_coldest(self, requester: Share | None = None) -> Item | None:
        return self._order.popitem(last=False)[0] if self._order else None

    def put_back(self, blocks: Sequence[Item]) -> None:
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block, last=False)

    def may_evict(self, block: Item, requester: Share | None, victims: Sequence[Item]) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._order)
