"""The pool of blocks: reference counts, the prefix index, eviction. Holds no bytes and no lock.

A block's life: `reserve` takes room and makes the block PENDING (invisible to others) or LOADING (a match may take it
and wait for its bytes); `commit` makes it READY under its hash. `match` and `reserve` count references, `free` returns
them. A READY block without references stays cached until the policy evicts it. A block that is dropped, or whose writer
gives up, leaves the index at once; its room is free once the last reference returns. The pool's owner makes all calls
from one thread or under one lock.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from kvtier.blocks.block import PINNED, Block, BlockState, PrefixIndex, Presence
from kvtier.blocks.eviction_window import Window, is_evictable, window_around
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy, LruPolicy
from kvtier.blocks.retaining_policy import RetainingPolicy
from kvtier.blocks.retention import Retention
from kvtier.blocks.run import Run
from kvtier.blocks.share import Share
from kvtier.blocks.space import Space, TakenRegion

_START = operator.attrgetter("start")
_RESTORED_TOGETHER = 64
"""Restored blocks that are added as one prompt: only the order of their uses is known."""
_MAX_HOPELESS = 1 << 14
"""Most blocks to examine in vain before the search for room gives up: the owner's lock is held meanwhile."""


@dataclass(frozen=True, slots=True)
class Match:
    """The leading run of READY blocks, and the state of the key that ended it (READY if all keys matched)."""

    blocks: list[Block]
    ended: Presence


@dataclass(frozen=True, slots=True)
class Grant:
    """The result of `reserve`: `blocks[i]` is for the hash at `positions[i]`.

    Hashes that were READY or PENDING already got no new block. `num_refused` hashes got no room, `num_declined` of them
    because the policy values the cached blocks more.
    """

    blocks: list[Block]
    positions: list[int]
    num_ready: int
    num_pending: int
    num_refused: int
    num_declined: int = 0


class BlockPool:
    """Blocks over one `Space`, for any number of prefix indexes. Never holds more than `num_units` units."""

    def __init__(
        self,
        num_units: int,
        policy: EvictionPolicy[Block] | None = None,
        *,
        make: Callable[[int, int], Block] = Block,
        on_evict: Callable[[Block], None] = lambda block: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` builds the blocks, possibly of a subclass. `on_evict` is called with each block that is evicted.

        Retentions expire by `clock`.
        """
        self._space = Space(num_units)
        self._policy: EvictionPolicy[Block] = LruPolicy() if policy is None else policy
        self._counts_shares = self._policy.counts_shares
        self._make = make
        self._on_evict = on_evict
        self._clock = clock
        self._retained: RetainingPolicy[Block] | None = None
        """The policy while any block is retained; None otherwise, to save its cost."""
        self.num_evicted = 0
        self.referenced_units = 0
        self.pinned_units = 0

    @property
    def num_units(self) -> int:
        return self._space.num_units

    @property
    def free_units(self) -> int:
        return self._space.free_units

    def match(self, index: PrefixIndex, hashes: Sequence[BlockHash], max_blocks: int | None = None) -> Match:
        """Reference the longest prefix of `hashes` that is READY or LOADING, at most `max_blocks` of it."""
        wanted = hashes if max_blocks is None else hashes[:max_blocks]
        get = cast("Callable[[BlockHash], Block]", index.blocks.get)  # a missing block's None ends the run
        matched = list(itertools.takewhile(operator.truth, map(get, wanted)))
        ready, loading = BlockState.READY, BlockState.LOADING
        num_fresh = 0
        wanted_again: list[Block] = []
        for position, block in enumerate(matched):
            state = block.state
            if state is not ready and state is not loading:
                del matched[position:]
                break
            if not block.num_refs:
                num_fresh += 1
                if not block.kept & PINNED:
                    wanted_again.append(block)
            block.num_refs += 1
        if wanted_again:
            self._policy.remove_all(wanted_again)
        self.referenced_units += num_fresh * index.block_units
        if len(matched) == len(hashes):
            return Match(matched, Presence.READY)
        ended = index.presence(hashes[len(matched)])
        if ended is Presence.MISS:
            self._policy.missed(matched[-1] if matched else None, index, hashes[len(matched)])
        return Match(matched, ended)

    def reserve(
        self,
        index: PrefixIndex,
        hashes: Sequence[BlockHash],
        max_blocks: int | None = None,
        *,
        state: Literal[BlockState.PENDING, BlockState.LOADING] = BlockState.PENDING,
        may_decline: bool = True,
    ) -> Grant:
        """Take room for the absent hashes, in order, evicting as needed; if room is short, the first ones get it.

        The new blocks are in `state` and carry one reference. A block that is READY under one of `hashes` is never
        evicted to make room for another of them. With `may_decline`, the policy may refuse room to new blocks that are
        worth less than those they would replace; LOADING blocks are wanted now, and are never declined.
        """
        present: list[Block] = []
        before: Block | None = None
        parent: Block | None = None
        wanted: dict[BlockHash, int] = {}
        num_pending = 0
        for position, block_hash in enumerate(hashes):
            block = index.blocks.get(block_hash)
            if block is None:
                if not wanted:
                    parent = before
                wanted.setdefault(block_hash, position)
                continue
            before = block
            if block.state is BlockState.READY:
                self._reference(block)
                present.append(block)
            else:
                num_pending += 1
        count = len(wanted) if max_blocks is None else min(len(wanted), max_blocks)
        run = self._policy.begin(parent, index, next(iter(wanted)), count) if count else None
        newcomer = run if may_decline and state is BlockState.PENDING else None
        blocks = self._take_room(count, index.block_units, index.share, newcomer)
        positions = []
        for block, (block_hash, position) in zip(blocks, wanted.items(), strict=False):
            block.hash = block_hash
            block.index = index
            block.state = state
            block.run = run
            index.blocks[block_hash] = block
            positions.append(position)
        self.referenced_units += len(blocks) * index.block_units
        if self._counts_shares:
            index.share.used += len(blocks) * index.block_units
        self.free_unused(present)
        num_declined = count - len(blocks) if run is not None and run.is_declined else 0
        return Grant(blocks, positions, len(present), num_pending, len(wanted) - len(blocks), num_declined)

    def take(self, count: int, size: int) -> list[Block]:
        """`count` PRIVATE blocks with one reference each, evicting as needed, or none of them."""
        blocks = self._take_room(count, size)
        self.referenced_units += len(blocks) * size
        private = BlockState.PRIVATE
        for block in blocks:
            block.state = private
        if len(blocks) < count:
            self.free(blocks)
            return []
        return blocks

    def name(self, block: Block, index: PrefixIndex, block_hash: BlockHash, *, is_ready: bool) -> bool:
        """Put a PRIVATE block into the index, READY or PENDING. False, and it stays PRIVATE, if the hash is taken."""
        assert block.state is BlockState.PRIVATE, "a block has one name"
        if block_hash in index.blocks:
            return False
        block.hash = block_hash
        block.index = index
        block.state = BlockState.READY if is_ready else BlockState.PENDING
        index.blocks[block_hash] = block
        return True

    def name_pending(self, blocks: Sequence[Block], index: PrefixIndex, hashes: Sequence[BlockHash]) -> None:
        """Put each PRIVATE one of `blocks` into the index as PENDING, under its hash in `hashes` if that is free."""
        known = index.blocks
        private, pending = BlockState.PRIVATE, BlockState.PENDING
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.state is private and known.setdefault(block_hash, block) is block:
                block.hash = block_hash
                block.index = index
                block.state = pending

    def show(self, blocks: Sequence[Block], index: PrefixIndex, hashes: Sequence[BlockHash]) -> list[int]:
        """Make READY the PENDING ones of `blocks`, and the PRIVATE ones whose hash in `hashes` is free.

        Returns their positions.
        """
        known = index.blocks
        pending, ready = BlockState.PENDING, BlockState.READY
        shown = []
        for position, block in enumerate(blocks):
            if block.state is not pending:
                assert block.state is BlockState.PRIVATE, "a block has one name"
                block_hash = hashes[position]
                if known.setdefault(block_hash, block) is not block:
                    continue
                block.hash = block_hash
                block.index = index
            block.state = ready
            shown.append(position)
        return shown

    def unname(self, block: Block) -> None:
        """Take a PENDING block out of the index and make it PRIVATE again, so that no request waits for it."""
        if block.state is BlockState.PENDING:
            self._forget(block)
            block.state = BlockState.PRIVATE

    def commit(self, blocks: Iterable[Block]) -> int:
        """Make PENDING blocks READY for everyone. Blocks dropped meanwhile stay gone. Returns how many became READY."""
        num_committed = 0
        for block in blocks:
            if block.state is BlockState.PENDING or block.state is BlockState.LOADING:
                block.state = BlockState.READY
                num_committed += 1
        return num_committed

    def fail(self, block: Block) -> None:
        """Give up a LOADING block whose load failed: it leaves the index now, and its room with the last reference."""
        if block.state is BlockState.LOADING:
            self._forget(block)

    def reference(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each of `blocks`, which the caller already holds."""
        for block in blocks:
            self._reference(block)

    def free(self, blocks: Sequence[Block]) -> None:
        """Return one reference of each block. The last blocks of a prefix become the coldest.

        A PENDING block without references was never finished: it leaves the pool, like a PRIVATE one.
        """
        freed = self._unreference(blocks)
        if freed:
            self._policy.add_all(freed)

    def free_unused(self, blocks: Sequence[Block]) -> None:
        """Like `free`, for blocks that were referenced but not used."""
        freed = self._unreference(blocks)
        if freed:
            self._policy.readmit(freed)

    def _unreference(self, blocks: Sequence[Block]) -> list[Block]:
        """Return one reference of each block. Returns the blocks that may be evicted now, in the order of `blocks`."""
        ready = BlockState.READY
        freed: list[Block] = []
        num_units = 0
        for block in reversed(blocks):
            num_refs = block.num_refs - 1
            assert num_refs >= 0, "a reference was returned twice"
            block.num_refs = num_refs
            if num_refs:
                continue
            num_units += block.size
            if block.state is ready:
                if not block.kept & PINNED:
                    freed.append(block)
                continue
            if block.state is BlockState.PENDING or block.state is BlockState.LOADING:
                self._forget(block)
            self._give_back(block)
        self.referenced_units -= num_units
        freed.reverse()
        return freed

    def drop(self, index: PrefixIndex, hashes: Iterable[BlockHash]) -> int:
        """Forget blocks, pinned or not. Their room is free at once, or with their last reference."""
        num_dropped = 0
        for block_hash in hashes:
            block = index.blocks.get(block_hash)
            if block is None:
                continue
            num_dropped += 1
            if block.num_refs == 0 and not block.is_pinned:
                self._policy.remove(block)
            self._forget(block)
            if self._retained is not None:
                self._retained.end(index, [block_hash])
            if block.num_refs == 0:
                self._give_back(block)
        return num_dropped

    def retain(self, index: PrefixIndex, hashes: Sequence[BlockHash], retention: Retention, max_units: int) -> int:
        """Retain the leading blocks of `hashes`, as many as the limits allow.

        `max_units` limits the retained blocks of the index's owner. Blocks that are not in the pool yet are retained
        once they come. Returns how many of `hashes` are retained as requested.
        """
        if self._retained is None:
            self._policy = self._retained = RetainingPolicy(self._policy, self._clock)
        count = self._retained.retain(index, hashes, retention, max_units)
        self._expire()
        return count

    def end_retention(self, index: PrefixIndex, hashes: Sequence[BlockHash], account: str) -> int:
        """End the retention of `hashes` by `account`. Returns how many blocks it had retained."""
        return 0 if self._retained is None else self._retained.end(index, hashes, account)

    def retained_units(self, share: Share | None = None) -> int:
        """The units retained now, in all or for one owner."""
        self._expire()
        if self._retained is None:
            return 0
        return self._retained.retained_units if share is None else self._retained.units_of(share)

    def pin(self, index: PrefixIndex, hashes: Iterable[BlockHash], max_units: int) -> int:
        """Keep the leading READY blocks until `unpin` or `drop`, up to `max_units` pinned units in all.

        If the policy counts shares, the limit of the index's share applies, too.
        """
        num_pinned, share = 0, index.share
        if self._counts_shares and share.max_pinned is not None:
            max_units = min(max_units, share.max_pinned)
        for block_hash in hashes:
            block = index.blocks.get(block_hash)
            if block is None or block.state is not BlockState.READY:
                continue
            if not block.is_pinned:
                num_units = share.pinned if self._counts_shares else self.pinned_units
                if num_units + block.size > max_units:
                    break
                if block.num_refs == 0:
                    self._policy.remove(block)
                block.is_pinned = True
                self._count_pinned(block, block.size)
            num_pinned += 1
        return num_pinned

    def unpin(self, index: PrefixIndex, hashes: Iterable[BlockHash]) -> int:
        num_unpinned = 0
        loose: list[Block] = []
        for block_hash in hashes:
            block = index.blocks.get(block_hash)
            if block is None or not block.is_pinned:
                continue
            num_unpinned += 1
            block.is_pinned = False
            self._count_pinned(block, -block.size)
            if block.num_refs == 0:
                loose.append(block)
        if loose:
            self._policy.readmit(loose)
        return num_unpinned

    def hold(self, block: Block) -> None:
        """Keep a block's room while a background thread reads or writes it, without changing its eviction order."""
        block.num_holds += 1

    def let_go(self, block: Block) -> None:
        assert block.num_holds > 0, "a hold was given up twice"
        block.num_holds -= 1
        if block.state is BlockState.GONE and not block.num_refs and not block.num_holds:
            self._return_room(block)

    def has_room(self, size: int) -> bool:
        """Whether `size` adjacent units are free without an eviction."""
        return self._space.has_room(size)

    def evict(self, count: int, requester: Share | None = None) -> None:
        """Evict the `count` coldest blocks that may be evicted for `requester`."""
        blocked: list[Block] = []
        while count and (victim := self._policy.pop_coldest(requester)) is not None:
            if victim.is_held:
                blocked.append(victim)
            else:
                self._evict(victim)
                count -= 1
        self._policy.put_back(blocked)

    def coldest(self, count: int) -> list[Block]:
        """The blocks that would be evicted next as of now."""
        return self._policy.coldest(count)

    def extend(self, num_units: int) -> None:
        self._space.extend(num_units)

    def shrink(self, num_units: int) -> bool:
        """Give up the last units, evicting the blocks there.

        Returns False, and changes nothing, if one of these blocks is in use or protected by its owner's quota.
        """
        end = self.num_units - num_units
        victims: list[Block] = []
        for region in self._space.regions_backwards():
            if region.start + region.size <= end:
                break
            if isinstance(region, Block):
                if not is_evictable(region) or not self._policy.may_evict(region, None, victims):
                    return False
                victims.append(region)
        for block in victims:
            self._policy.remove(block)
            self._evict(block)
        self._space.cut(num_units)
        return True

    def restore(self, num_units: int, regions: Sequence[TakenRegion], cold_to_warm: Iterable[Block]) -> None:
        """Start with existing blocks: `regions` do not overlap; the blocks among them, `cold_to_warm`, become READY."""
        self._space = Space.restored(num_units, regions)
        loose: list[Block] = []
        for block in cold_to_warm:
            block.num_refs = 0
            block.state = BlockState.READY
            block.index.blocks[block.hash] = block
            if self._counts_shares:
                block.index.share.used += block.size
            if block.is_pinned:
                self._count_pinned(block, block.size)
            else:
                loose.append(block)
        for first in range(0, len(loose), _RESTORED_TOGETHER):
            self._policy.add_all(loose[first : first + _RESTORED_TOGETHER][::-1])

    def touch(self, blocks: Sequence[Block]) -> None:
        """Make the unreferenced ones of `blocks` the most recently used; the first becomes the hottest."""
        touched = [block for block in dict.fromkeys(blocks) if is_evictable(block)]
        for block in touched:
            self._policy.remove(block)
        if touched:
            self._policy.add_all(touched)

    def _reference(self, block: Block) -> None:
        if block.num_refs == 0:
            if not block.kept & PINNED:
                self._policy.remove(block)
            self.referenced_units += block.size
        block.num_refs += 1

    def _count_pinned(self, block: Block, num_units: int) -> None:
        self.pinned_units += num_units
        if self._counts_shares:
            block.index.share.pinned += num_units

    def _forget(self, block: Block) -> None:
        if block.is_pinned:
            block.is_pinned = False
            self._count_pinned(block, -block.size)
        block.state = BlockState.GONE
        block.run = None
        del block.index.blocks[block.hash]

    def _take_room(
        self, count: int, size: int, requester: Share | None = None, newcomer: Run[Block] | None = None
    ) -> list[Block]:
        """Up to `count` new blocks of `size`, evicting as needed.

        A `newcomer` that a match can reach gets at least one block even if the policy declines it: that starts its
        history.
        """
        self._expire()
        blocks = self._space.take(count, size, self._make)
        if count and not blocks and newcomer is not None and newcomer.is_reachable:
            blocks = self._evict_for(1, size, requester, None)
            if not blocks:
                return blocks
        return blocks + self._evict_for(count - len(blocks), size, requester, newcomer)

    def _evict_for(self, count: int, size: int, requester: Share | None, newcomer: Run[Block] | None) -> list[Block]:
        blocks = self._replace_coldest(count, size, requester, newcomer) if count else []
        if len(blocks) < count and not (newcomer is not None and newcomer.is_declined):
            self._make_room(count - len(blocks), size, requester, newcomer)
            blocks += self._space.take(count - len(blocks), size, self._make)
        return blocks

    def _expire(self) -> None:
        if self._retained is not None:
            self._retained.expire()
            if self._retained.is_empty:
                self._policy, self._retained = self._retained.inner, None

    def _replace_coldest(
        self, count: int, size: int, requester: Share | None, newcomer: Run[Block] | None
    ) -> list[Block]:
        """New blocks in place of the coldest ones, as long as those have the right size and no units are free.

        `_make_room` would evict the same blocks, but join and split regions: too slow for thousands of blocks.
        """
        blocks: list[Block] = []
        if self._space.free_units:
            return blocks
        policy, on_evict, replace, make = self._policy, self._on_evict, self._space.replace, self._make
        gone = BlockState.GONE
        fits = True
        while fits and len(blocks) < count:
            victims = policy.pop_several(count - len(blocks), requester, newcomer)
            if not victims:
                break
            for position, victim in enumerate(victims):
                if victim.size != size or victim.num_holds:
                    policy.put_back(victims[position:])
                    fits = False
                    break
                on_evict(victim)
                victim.state = gone
                del victim.index.blocks[victim.hash]
                if self._counts_shares:
                    victim.index.share.used -= size
                blocks.append(replace(victim, make))
        self.num_evicted += len(blocks)
        blocks.sort(key=_START)
        return blocks

    def _make_room(self, count: int, size: int, requester: Share | None, newcomer: Run[Block] | None) -> None:
        """Evict the coldest blocks until `count` more regions of `size` fit, or nothing more can be evicted.

        If blocks of another size are in the way, the coldest block's neighbours are evicted with it, so that room for
        one large block costs a few small ones, not a search through all of them.
        """
        fitting = 0
        blocked: list[Block] = []
        hopeless: set[Block] = set()
        while fitting < count and len(hopeless) < _MAX_HOPELESS:
            victim = self._policy.pop_coldest(requester, newcomer)
            if victim is None:
                break
            if victim in hopeless:
                blocked.append(victim)
                continue
            if victim.is_held:
                window = Window([victim], None)
            else:
                window = window_around(victim, size, requester, self._policy.may_evict)
            if window.num_gained is None:
                # All of the window's blocks lie between two that must stay: none of them has a larger window.
                hopeless.update(window.blocks)
                blocked.append(victim)
                continue
            for block in window.blocks:
                if block is not victim:
                    self._policy.remove(block)
                self._evict(block)
            fitting += window.num_gained
        self._policy.put_back(blocked)

    def _give_back(self, block: Block) -> None:
        if not block.is_held:
            self._return_room(block)

    def _return_room(self, block: Block) -> None:
        if self._counts_shares:
            block.index.share.used -= block.size
        self._space.give_back(block)

    def _evict(self, block: Block) -> None:
        self._on_evict(block)
        self._forget(block)
        self._return_room(block)
        self.num_evicted += 1
