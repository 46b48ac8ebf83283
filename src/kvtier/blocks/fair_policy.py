"""Whose blocks go when several owners share one pool and room is needed.

Each owner has a share: `quota` units are its own, whatever the others do. Room that nobody has claimed may be used by
anyone, and is taken back from whoever is furthest above its quota, the coldest of its blocks first. So nobody's blocks
are evicted for others while they are within its quota.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.share import Share

_POPS_OF_ONE = 16
"""So many blocks of one share go before it is asked again who is furthest above: prompts need thousands."""


class _Index(Protocol):
    share: Share


class _Owned(Protocol):
    """A block of a pool, in an index that counts towards a share."""

    size: int

    @property
    def index(self) -> _Index: ...


_Block = TypeVar("_Block", bound=_Owned)


class FairPolicy(Generic[_Block]):
    """An order of eviction for each share, made by `make_order`; see `EvictionPolicy`."""

    counts_shares = True

    def __init__(self, make_order: Callable[[], LruPolicy[_Block]]) -> None:
        self._make_order = make_order
        self._orders: dict[Share, LruPolicy[_Block]] = {}
        self._loser: Share | None = None
        self._num_left = 0

    def add(self, block: _Block) -> None:
        share = block.index.share
        order = self._orders.get(share)
        if order is None:
            order = self._orders[share] = self._make_order()
        order.add(block)

    def remove(self, block: _Block) -> None:
        self._orders[block.index.share].remove(block)

    def pop_coldest(self, requester: Share | None = None) -> _Block | None:
        """Of whoever is furthest above its quota; what `requester` itself has, if nobody else is above theirs."""
        loser = self._loser
        if loser is not None and self._num_left and (loser.excess > 0 or loser is requester):
            block = self._orders[loser].pop_coldest()
            if block is not None:
                self._num_left -= 1
                return block
        above = [share for share in self._orders if share.excess > 0 or share is requester]
        for share in sorted(above, key=lambda share: share.excess, reverse=True):
            block = self._orders[share].pop_coldest()
            if block is not None:
                self._loser, self._num_left = share, _POPS_OF_ONE
                return block
        return None

    def put_back(self, blocks: Sequence[_Block]) -> None:
        of_shares: dict[Share, list[_Block]] = {}
        for block in blocks:
            of_shares.setdefault(block.index.share, []).append(block)
        for share, of_one in of_shares.items():
            self._orders[share].put_back(of_one)

    def may_evict(self, block: _Block, requester: Share | None, victims: Sequence[_Block]) -> bool:
        """Whether `block` may go too, to make room for `requester`, once `victims` have gone."""
        share = block.index.share
        if share is requester:
            return True
        return share.excess > sum(victim.size for victim in victims if victim.index.share is share)

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))
