"""Eviction when several owners share one pool.

Each owner has a share, with `quota` units guaranteed to it. Any owner may use the rest of the room. When room is
needed, the owner furthest above its quota loses its coldest blocks, so an owner within its quota loses none to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.run import Run, Scoped
from kvtier.blocks.share import Share

_POPS_OF_ONE = 16
"""Blocks evicted from one share before the shares are compared again, for speed: a prompt needs thousands."""


class _Owned(Protocol):
    """A block of a pool, in an index that counts towards a share."""

    size: int

    @property
    def index(self) -> Scoped: ...


_Block = TypeVar("_Block", bound=_Owned)


class FairPolicy(Generic[_Block]):
    """An order of eviction for each share, made by `make_order`; see `EvictionPolicy`."""

    counts_shares = True

    def __init__(self, make_order: Callable[[], EvictionPolicy[_Block]]) -> None:
        self._make_order = make_order
        self._orders: dict[Share, EvictionPolicy[_Block]] = {}
        self._loser: Share | None = None
        self._num_left = 0

    def missed(self, parent: _Block | None, index: Scoped, block_hash: BlockHash) -> None:
        self._order_of(index.share).missed(parent, index, block_hash)

    def begin(self, parent: _Block | None, index: Scoped, block_hash: BlockHash, count: int) -> Run[_Block] | None:
        return self._order_of(index.share).begin(parent, index, block_hash, count)

    def add_all(self, blocks: Sequence[_Block]) -> None:
        for share, of_one in _by_share(blocks).items():
            self._order_of(share).add_all(of_one)

    def readmit(self, blocks: Sequence[_Block]) -> None:
        for share, of_one in _by_share(blocks).items():
            self._order_of(share).readmit(of_one)

    def remove(self, block: _Block) -> None:
        self._orders[block.index.share].remove(block)

    def remove_all(self, blocks: Sequence[_Block]) -> None:
        for share, of_one in _by_share(blocks).items():
            self._orders[share].remove_all(of_one)

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[_Block] | None = None) -> _Block | None:
        """A block of the share furthest above its quota; of `requester` itself if no other share is above its own.

        New blocks of a share are weighed against blocks of the same share only.
        """
        loser = self._loser
        if loser is not None and self._num_left and (loser.excess > 0 or loser is requester):
            block = self._orders[loser].pop_coldest(requester, newcomer if loser is requester else None)
            if block is not None:
                self._num_left -= 1
                return block
        above = [share for share in self._orders if share.excess > 0 or share is requester]
        for share in sorted(above, key=lambda share: share.excess, reverse=True):
            block = self._orders[share].pop_coldest(requester, newcomer if share is requester else None)
            if block is not None:
                self._loser, self._num_left = share, _POPS_OF_ONE
                return block
        return None

    def pop_several(
        self, count: int, requester: Share | None = None, newcomer: Run[_Block] | None = None
    ) -> list[_Block]:
        """At most one block: each eviction changes how far the shares are above their quotas."""
        block = self.pop_coldest(requester, newcomer)
        return [] if block is None else [block]

    def put_back(self, blocks: Sequence[_Block]) -> None:
        for share, of_one in _by_share(blocks).items():
            self._orders[share].put_back(of_one)

    def may_evict(self, block: _Block, requester: Share | None, victims: Sequence[_Block]) -> bool:
        """Whether `block` may be evicted for `requester`, too, once `victims` are."""
        share = block.index.share
        if share is requester:
            return True
        return share.excess > sum(victim.size for victim in victims if victim.index.share is share)

    def coldest(self, count: int) -> list[_Block]:
        """The blocks evicted next, first those of the owner furthest above its quota."""
        found: list[_Block] = []
        for share in sorted(self._orders, key=lambda share: share.excess, reverse=True):
            found += self._orders[share].coldest(count - len(found))
        return found

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def _order_of(self, share: Share) -> EvictionPolicy[_Block]:
        order = self._orders.get(share)
        if order is None:
            order = self._orders[share] = self._make_order()
        return order


def _by_share(blocks: Sequence[_Block]) -> dict[Share, list[_Block]]:
    of_shares: dict[Share, list[_Block]] = {}
    for block in blocks:
        of_shares.setdefault(block.index.share, []).append(block)
    return of_shares
