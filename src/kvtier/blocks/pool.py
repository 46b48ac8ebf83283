"""The pool of blocks: reference counts, the prefix index, eviction. Holds no bytes and no lock.

A block's life: `reserve` takes room and makes it PENDING, invisible to others, or LOADING, which a match may take and
wait for; `commit` makes it READY under its hash;
`match` and `reserve` count references, `free` returns them; a READY block without references stays cached until the
policy picks it. A block that is dropped, or whose writer gives up, leaves the index at once and its room when the
last reference returns. The owner of the pool calls everything from one thread or under one lock.
"""

from __future__ import annotations

import enum
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.policies import EvictionPolicy, LruPolicy
from kvtier.blocks.retaining_policy import RetainingPolicy
from kvtier.blocks.retention import Retention
from kvtier.blocks.run import Run
from kvtier.blocks.share import Share
from kvtier.blocks.space import Region, Space, TakenRegion

_START = operator.attrgetter("start")
_PINNED, _RETAINED = 1, 2
_RESTORED_TOGETHER = 64
"""Blocks that count as one prompt's when their uses are known by their order alone."""
_MAX_HOPELESS = 1 << 14
"""How many blocks are looked at in vain before room is said not to be there: the owner's lock is held meanwhile."""


class Presence(enum.Enum):
    """The state of one key."""

    MISS = enum.auto()
    PENDING = enum.auto()  # being written; ask again
    READY = enum.auto()


ENDED = {
    Presence.READY: MatchEnd.ALL,
    Presence.MISS: MatchEnd.NEVER_STORED,
    Presence.PENDING: MatchEnd.PENDING,
}
"""What a lease says of the key that ended its match."""


class BlockState(enum.Enum):
    """Where a block is in its life."""

    PRIVATE = enum.auto()  # has no hash yet: only its writer knows it
    PENDING = enum.auto()
    LOADING = enum.auto()  # its bytes are on their way from a slower tier: a match may take it and wait
    READY = enum.auto()
    GONE = enum.auto()  # out of the index, waiting for its last reference


class Block(TakenRegion):
    """One block's place in a pool. `start` is its block id: the first unit it occupies."""

    __slots__ = ("hash", "index", "kept", "num_holds", "num_refs", "run", "state")

    def __init__(self, start: int, size: int) -> None:
        self.start = start  # here and not by the base: thousands are made for one prompt
        self.size = size
        self.left = self.right = None
        self.hash: BlockHash
        self.index: PrefixIndex
        self.num_refs = 1
        self.state = BlockState.PENDING
        self.kept = 0
        """Flags in one place, since there are many blocks: zero unless it is pinned or retained."""
        self.num_holds = 0
        self.run: Run[Any] | None = None

    @property
    def is_pinned(self) -> bool:
        return bool(self.kept & _PINNED)

    @is_pinned.setter
    def is_pinned(self, value: bool) -> None:
        self.kept = self.kept | _PINNED if value else self.kept & ~_PINNED

    @property
    def is_retained(self) -> bool:
        """Nothing but a retention keeps it from eviction."""
        return bool(self.kept & _RETAINED)

    @is_retained.setter
    def is_retained(self, value: bool) -> None:
        self.kept = self.kept | _RETAINED if value else self.kept & ~_RETAINED

    @property
    def is_held(self) -> bool:
        return self.num_holds > 0

    @property
    def is_ready(self) -> bool:
        return self.state is BlockState.READY


class PrefixIndex:
    """The blocks of one namespace by hash. Every block in it has `block_units` units, and counts towards `share`.

    A hash names a whole prefix, so the longest cached prefix is the leading run of hashes that are READY. `scope` is
    what the index has among `Ghosts`.
    """

    def __init__(self, block_units: int, share: Share | None = None, scope: int = 0) -> None:
        self.block_units = block_units
        self.share = Share() if share is None else share
        self.scope = scope
        self.blocks: dict[BlockHash, Block] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def presence(self, block_hash: BlockHash) -> Presence:
        block = self.blocks.get(block_hash)
        if block is None:
            return Presence.MISS
        return Presence.PENDING if block.state is BlockState.PENDING else Presence.READY


@dataclass(frozen=True, slots=True)
class Match:
    """The leading run that was READY, and the state of the key that ended it (READY: all of them matched)."""

    blocks: list[Block]
    ended: Presence


@dataclass(frozen=True, slots=True)
class Grant:
    """What `reserve` gave: `blocks[i]` is for the hash at `positions[i]`.

    Hashes that were READY or PENDING already are not in it; `num_refused` more found no room, `num_declined` of them
    because the policy thinks more of what is cached.
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
        """`make` builds the blocks, which may carry more; `on_evict` hears of each one that is evicted.

        Retentions end by `clock`.
        """
        self._space = Space(num_units)
        self._policy: EvictionPolicy[Block] = LruPolicy() if policy is None else policy
        self._counts_shares = self._policy.counts_shares
        self._make = make
        self._on_evict = on_evict
        self._clock = clock
        self._retained: RetainingPolicy[Block] | None = None
        """The policy, while something is retained: else nobody pays for that."""
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
        get = cast("Callable[[BlockHash], Block]", index.blocks.get)  # its None ends the run
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
                if not block.is_pinned:
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
        """Take room for the hashes that are absent, in order, evicting as needed; the first ones win if it is short.

        The new blocks are in `state` and carry one reference. A block that is READY under one of `hashes` is never
        evicted to make room for another of them. If it `may_decline`, and the policy does so, new blocks that are worth
        less than those they would replace get no room; what is being read was asked for, and always gets it.
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
        """Show a PRIVATE block under a hash, READY or PENDING; False, and it stays private, if the hash is taken."""
        assert block.state is BlockState.PRIVATE, "a block has one name"
        if block_hash in index.blocks:
            return False
        block.hash = block_hash
        block.index = index
        block.state = BlockState.READY if is_ready else BlockState.PENDING
        index.blocks[block_hash] = block
        return True

    def name_pending(self, blocks: Sequence[Block], index: PrefixIndex, hashes: Sequence[BlockHash]) -> None:
        """As `name` for each of `blocks` that is PRIVATE, under the hash at its place in `hashes`."""
        known = index.blocks
        private, pending = BlockState.PRIVATE, BlockState.PENDING
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.state is private and known.setdefault(block_hash, block) is block:
                block.hash = block_hash
                block.index = index
                block.state = pending

    def show(self, blocks: Sequence[Block], index: PrefixIndex, hashes: Sequence[BlockHash]) -> list[int]:
        """READY from now on: those that are PENDING, and the PRIVATE ones whose hash in `hashes` is not taken.

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
        """A PENDING block is private again: no request waits for it."""
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
        """The bytes of a LOADING block will not come. It leaves the index, and its room with the last reference."""
        if block.state is BlockState.LOADING:
            self._forget(block)

    def reference(self, blocks: Iterable[Block]) -> None:
        """One more reference on blocks that the caller already holds."""
        for block in blocks:
            self._reference(block)

    def free(self, blocks: Sequence[Block]) -> None:
        """Return one reference of each block. The last ones of a prefix become the coldest.

        A PENDING block without references was never finished: it leaves, as does a PRIVATE one.
        """
        freed = self._unreference(blocks)
        if freed:
            self._policy.add_all(freed)

    def free_unused(self, blocks: Sequence[Block]) -> None:
        """As `free`, of blocks that were referenced for another reason than that somebody wanted them."""
        freed = self._unreference(blocks)
        if freed:
            self._policy.readmit(freed)

    def _unreference(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns those that may be evicted now, in the order of `blocks`."""
        ready = BlockState.READY
        freed: list[Block] = []
        for block in reversed(blocks):
            num_refs = block.num_refs - 1
            assert num_refs >= 0, "a reference was returned twice"
            block.num_refs = num_refs
            if num_refs:
                continue
            self.referenced_units -= block.size
            if block.state is ready:
                if not block.is_pinned:
                    freed.append(block)
                continue
            if block.state is BlockState.PENDING or block.state is BlockState.LOADING:
                self._forget(block)
            self._give_back(block)
        freed.reverse()
        return freed

    def drop(self, index: PrefixIndex, hashes: Iterable[BlockHash]) -> int:
        """Forget blocks, pinned or not. Their room returns at once, or with their last reference."""
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
        """Keep these from eviction for a time: the leading ones, as far as limits go.

        `max_units` is what the index's owner may have retained. Blocks that are not there yet are retained once they
        come. Returns how many of `hashes` are retained as asked.
        """
        if self._retained is None:
            self._policy = self._retained = RetainingPolicy(self._policy, self._clock)
        count = self._retained.retain(index, hashes, retention, max_units)
        self._expire()
        return count

    def end_retention(self, index: PrefixIndex, hashes: Sequence[BlockHash], account: str) -> int:
        """What `account` has retained of `hashes` is as other blocks are. Returns how many that were."""
        return 0 if self._retained is None else self._retained.end(index, hashes, account)

    def retained_units(self, share: Share | None = None) -> int:
        """All that are retained now, or those of one owner."""
        self._expire()
        if self._retained is None:
            return 0
        return self._retained.retained_units if share is None else self._retained.units_of(share)

    def pin(self, index: PrefixIndex, hashes: Iterable[BlockHash], max_units: int) -> int:
        """Keep READY blocks until `unpin` or `drop`, the leading ones up to `max_units` pinned in all.

        Where shares are counted, up to what the index's share may have.
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
        """Keep a block's room while it is read or written in passing; its place in the order of eviction stays."""
        block.num_holds += 1

    def let_go(self, block: Block) -> None:
        assert block.num_holds > 0, "a hold was given up twice"
        block.num_holds -= 1
        if block.state is BlockState.GONE and not block.num_refs and not block.num_holds:
            self._return_room(block)

    def has_room(self, size: int) -> bool:
        """`size` adjacent units are free: nothing need be evicted for them."""
        return self._space.has_room(size)

    def evict(self, count: int, requester: Share | None = None) -> None:
        """Evict the `count` coldest blocks that may go for `requester`."""
        blocked: list[Block] = []
        while count and (victim := self._policy.pop_coldest(requester)) is not None:
            if victim.is_held:
                blocked.append(victim)
            else:
                self._evict(victim)
                count -= 1
        self._policy.put_back(blocked)

    def coldest(self, count: int) -> list[Block]:
        """Blocks that would be evicted next, as things are."""
        return self._policy.coldest(count)

    def extend(self, num_units: int) -> None:
        self._space.extend(num_units)

    def shrink(self, num_units: int) -> bool:
        """Give up the last units, evicting what lies there.

        False, and nothing changes, when some of it is in use, or is not to be evicted for others.
        """
        end = self.num_units - num_units
        victims: list[Block] = []
        for region in self._space.regions_backwards():
            if region.start + region.size <= end:
                break
            if isinstance(region, Block):
                if not _is_evictable(region) or not self._policy.may_evict(region, None, victims):
                    return False
                victims.append(region)
        for block in victims:
            self._policy.remove(block)
            self._evict(block)
        self._space.cut(num_units)
        return True

    def restore(self, num_units: int, regions: Sequence[TakenRegion], cold_to_warm: Iterable[Block]) -> None:
        """Begin with existing blocks: `regions` tile no unit twice, the blocks among them are READY."""
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
        """Make unreferenced blocks the most recently used, the first of them last to go."""
        touched = [block for block in dict.fromkeys(blocks) if _is_evictable(block)]
        for block in touched:
            self._policy.remove(block)
        if touched:
            self._policy.add_all(touched)

    def _reference(self, block: Block) -> None:
        if block.num_refs == 0:
            if not block.is_pinned:
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

        Of a `newcomer` that a match can reach, one at least, whatever the policy thinks of it: it has a history then.
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
        """New blocks in the places of the coldest, as long as those have the right size and nothing else is free.

        What `_make_room` would evict then too, without joining and splitting regions: prompts take thousands.
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

        Where blocks of another size are in the way, the coldest block's neighbours go with it, so that room for
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
                window = _Window([victim], None)
            else:
                window = _window_around(victim, size, requester, self._policy.may_evict)
            if window.num_gained is None:
                # None of the blocks between two that must stay: no window of theirs is larger.
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


def _is_evictable(region: Region | None) -> bool:
    return (
        isinstance(region, Block)
        and region.state is BlockState.READY
        and region.num_refs == 0
        and not region.is_pinned
        and not region.is_held
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """Blocks whose eviction makes one free run, and how many more regions of the wanted size fit then.

    `num_gained` is None when not even one fits.
    """

    blocks: list[Block]
    num_gained: int | None


def _window_around(
    victim: Block,
    size: int,
    requester: Share | None,
    may_evict: Callable[[Block, Share | None, Sequence[Block]], bool],
) -> _Window:
    """The smallest window of evictable blocks around `victim` that makes room for `size`, or the largest there is.

    Prefixes are written upwards and go cold from their end, so it grows downwards first, but not into a larger block
    than lies on the other side: that may be the one that was last made room for in this way.
    """
    blocks = [victim]
    run = victim.size
    fitting_before = 0
    left, right = victim.left, victim.right

    def can_go(region: Region | None) -> TypeGuard[Block]:
        return isinstance(region, Block) and _is_evictable(region) and may_evict(region, requester, blocks)

    while True:
        if left is not None and left.is_free:
            run, fitting_before, left = run + left.size, fitting_before + left.size // size, left.left
        if right is not None and right.is_free:
            run, fitting_before, right = run + right.size, fitting_before + right.size // size, right.right
        if run >= size:
            return _Window(blocks, run // size - fitting_before)
        is_right_smaller = can_go(right) and left is not None and right.size < left.size
        if can_go(left) and not is_right_smaller:
            blocks.append(left)
            run, left = run + left.size, left.left
        elif can_go(right):
            blocks.append(right)
            run, right = run + right.size, right.right
        else:
            return _Window(blocks, None)
