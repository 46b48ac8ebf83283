"""Eviction policies: which block is evicted first when room is needed. A policy sees only evictable blocks."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.run import Run, Scoped
from kvtier.blocks.share import Share

Item = TypeVar("Item")


class EvictionPolicy(Protocol[Item]):
    """The order in which a pool evicts its blocks. Called only by the pool that owns it, under that pool's lock.

    `add_all` adds blocks of one prompt, in its order, that have just been used and may be evicted from now on;
    `readmit` adds blocks that were not used, but pinned, retained or referenced by the pool itself. `remove` and
    `remove_all` take out blocks that may no longer be evicted. `pop_coldest` takes out the next victim, or returns None
    if there is none; `pop_several` takes out at least one if there is any; `put_back` undoes pops, given coldest first.
    `requester` is the share that needs the room; it has no meaning in a pool with a single owner. `missed` and `begin`
    tell which prompt new blocks continue. `newcomer` is the run that `begin` made for them: a policy may return no
    victim for it if the new blocks are worth less than those they would replace.
    """

    counts_shares: bool
    """Whether the pool counts the units that each share uses."""

    def missed(self, parent: Item | None, index: Scoped, block_hash: BlockHash) -> None:
        """Note that a match ended at `block_hash`, behind `parent`."""
        ...

    def begin(self, parent: Item | None, index: Scoped, block_hash: BlockHash, count: int) -> Run[Item] | None:
        """Note that `count` new blocks will be stored from `block_hash` on, behind `parent` if that is known."""
        ...

    def add_all(self, blocks: Sequence[Item]) -> None: ...

    def readmit(self, blocks: Sequence[Item]) -> None: ...

    def remove(self, block: Item) -> None: ...

    def remove_all(self, blocks: Sequence[Item]) -> None: ...

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[Item] | None = None) -> Item | None: ...

    def pop_several(
        self, count: int, requester: Share | None = None, newcomer: Run[Item] | None = None
    ) -> list[Item]: ...

    def put_back(self, blocks: Sequence[Item]) -> None: ...

    def may_evict(self, block: Item, requester: Share | None, victims: Sequence[Item]) -> bool:
        """Whether `block` may be evicted as well as `victims`, though it is not the coldest."""
        ...

    def coldest(self, count: int) -> list[Item]:
        """The blocks that would be evicted next as of now, without taking them out."""
        ...

    def __len__(self) -> int: ...


class LruPolicy(Generic[Item]):
    """Least recently used first."""

    counts_shares = False

    def __init__(self) -> None:
        self._order: OrderedDict[Item, None] = OrderedDict()

    def missed(self, parent: Item | None, index: Scoped, block_hash: BlockHash) -> None:
        pass

    def begin(self, parent: Item | None, index: Scoped, block_hash: BlockHash, count: int) -> Run[Item] | None:
        return None

    def add_all(self, blocks: Sequence[Item]) -> None:
        order = self._order
        for block in reversed(blocks):
            order[block] = None

    def readmit(self, blocks: Sequence[Item]) -> None:
        self.add_all(blocks)

    def remove(self, block: Item) -> None:
        del self._order[block]

    def remove_all(self, blocks: Sequence[Item]) -> None:
        order = self._order
        for block in blocks:
            del order[block]

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[Item] | None = None) -> Item | None:
        return self._order.popitem(last=False)[0] if self._order else None

    def pop_several(self, count: int, requester: Share | None = None, newcomer: Run[Item] | None = None) -> list[Item]:
        order = self._order
        return [order.popitem(last=False)[0] for _ in range(min(count, len(order)))]

    def put_back(self, blocks: Sequence[Item]) -> None:
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block, last=False)

    def may_evict(self, block: Item, requester: Share | None, victims: Sequence[Item]) -> bool:
        return True

    def coldest(self, count: int) -> list[Item]:
        return list(itertools.islice(self._order, count))

    def __len__(self) -> int:
        return len(self._order)
