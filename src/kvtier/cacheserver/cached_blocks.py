"""The blocks of all namespaces: in memory, on disk, in a cluster, and in flight between them.

Callers hold the catalog's lock. The exceptions are the methods for the disk's and the cluster's threads, which take it
themselves, briefly.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from kvtier.blocks.block import ENDED, Block, BlockState, Presence
from kvtier.blocks.eviction import Eviction
from kvtier.blocks.fair_policy import FairPolicy
from kvtier.blocks.ghosts import Ghosts
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.pool import BlockPool, Grant, Match
from kvtier.cacheserver.cluster_below import NO_CLUSTER, SharedCluster
from kvtier.cacheserver.cluster_spaces import NOWHERE, Elsewhere
from kvtier.cacheserver.namespaces import Hashes, MemoryBlock, MemorySpace, Namespaces
from kvtier.cacheserver.persistence import Disk
from kvtier.cacheserver.sealer import NoSealer, Sealer
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.disk import DiskStore
from kvtier.stores.stored_block import StoredBlock
from kvtier.wire.messages import LISTED_DISK, match_end_of

logger = logging.getLogger(__name__)

_ROOM_S = 0.5
_NEARLY_FULL = 8
"""Memory counts as tight when fewer than one in this many units are free."""
_LEAVING_BLOCKS = 256
_MAX_SWEPT_SPACES = 1024

Clock: TypeAlias = Callable[[], float]


class CachedBlocks:
    """One pool over the arena, the disk behind it, and a cluster that hosts share.

    Without `keeps_stored`, a block leaves memory as soon as it is on disk and unreferenced. With `is_shared`, each
    tenant has a share of the memory.
    """

    def __init__(
        self,
        num_units: int,
        disk: Disk,
        namespaces: Namespaces,
        lock: threading.Lock,
        clock: Clock,
        keeps_stored: bool,
        is_shared: bool,
        sealer: Sealer | NoSealer,
        cluster: SharedCluster,
        eviction: Eviction,
    ) -> None:
        self.ghosts = Ghosts()
        is_last = cluster is NO_CLUSTER  # with a cluster, blocks reach it through memory, so memory declines none
        make_policy = functools.partial(
            disk.eviction_policy, eviction, clock, evicts_unsafe=keeps_stored, declines=is_last
        )
        policy: EvictionPolicy[Block] = FairPolicy(make_policy) if is_shared else make_policy()
        self.pool = BlockPool(num_units, policy, make=MemoryBlock, on_evict=self._note_evicted, clock=clock)
        self._disk = disk
        self._sealer = sealer
        self._cluster = cluster
        self._namespaces = namespaces
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._clock = clock
        self._keeps_stored = keeps_stored
        self.num_loading = 0
        self.num_altered = 0
        self._log = LogLimit(logger)
        self._num_dropping = 0
        self._awaited: dict[Block, list[threading.Event]] = {}
        """Blocks being loaded, with one event per client that waits for exactly that block."""

    # --- reading ---------------------------------------------------------------------------------------------------

    def absent(self, space: MemorySpace, hashes: Hashes) -> tuple[list[BlockHash], bool]:
        """The hashes found neither in memory nor on disk, and whether a match may continue past the last of `hashes`.

        It may not if one of the blocks is still being written: every match ends there.
        """
        blocks, pending = space.index.blocks, BlockState.PENDING
        if all(map(blocks.__contains__, hashes)):
            return [], not any(blocks[block_hash].state is pending for block_hash in hashes)
        wanted: list[BlockHash] = []
        goes_on = True
        for block_hash in hashes:
            block = blocks.get(block_hash)
            if block is None:
                wanted.append(block_hash)
            elif block.state is pending:
                goes_on = False
                break
        stored = self._disk.contains(space, wanted)
        return [block_hash for block_hash, is_stored in zip(wanted, stored, strict=True) if not is_stored], goes_on

    def find(
        self, space: MemorySpace, hashes: Hashes, max_blocks: int, elsewhere: Elsewhere = NOWHERE
    ) -> tuple[list[Block], MatchEnd]:
        """Reference the longest prefix in memory, on disk and `elsewhere`; blocks not in memory start to load."""
        match = self.find_in_memory(space, hashes, max_blocks)
        blocks, ended = match.blocks, match.ended
        num_in_memory = len(blocks)
        while ended is Presence.MISS and len(blocks) < max_blocks:
            found = self._disk.match(space, hashes, len(blocks), max_blocks)
            loading = [] if found is None else self._load(space, *found)
            if not loading and elsewhere.found:
                loading = self._fetch(space, hashes[len(blocks) : max_blocks], elsewhere)
            if not loading:
                break
            blocks += loading
            more = self.pool.match(space.index, hashes[len(blocks) :], max_blocks - len(blocks))
            blocks += more.blocks
            ended = more.ended
        if num_in_memory or len(blocks) > 1:
            # A load marks its block as used on disk, but several loads do so in no particular order.
            self._disk.note_used(space, hashes, len(blocks))
        if ended is Presence.MISS:
            return blocks, self._why_absent(space, hashes[len(blocks)], elsewhere)
        return blocks, ENDED[ended]

    def find_in_memory(self, space: MemorySpace, hashes: Hashes, max_blocks: int) -> Match:
        """Reference the longest prefix that is in memory or loading, and count it as reused."""
        match = self.pool.match(space.index, hashes, max_blocks)
        self._disk.note_reused(space, match.blocks)
        self._cluster.note_worth(space, match.blocks)
        return match

    def find_lazily(
        self,
        space: MemorySpace,
        hashes: Hashes,
        max_blocks: int,
        most_blocks: int,
        elsewhere: Elsewhere = NOWHERE,
        before: Sequence[Block] = (),
    ) -> tuple[list[Block], MatchEnd, int]:
        """Reference the longest prefix in memory; count the blocks that follow it on disk, `elsewhere` or in memory.

        The first blocks are `before`, referenced already. If more is in memory than the `most_blocks` that the client
        may ever hold, what is on disk, too, is counted. The client matches what is counted piece by piece: to leave it
        room for that, at most half of `max_blocks` stays referenced if the others are on disk.
        """
        match = self.find_in_memory(space, hashes[len(before) :], max_blocks - len(before))
        blocks, ended = [*before, *match.blocks], match.ended
        half, end = max_blocks // 2, len(blocks)
        if blocks:
            self._disk.note_used(space, hashes, end)
        is_cut = ended is Presence.READY and end < len(hashes)
        if is_cut:
            is_longer = len(hashes) > most_blocks and all(
                map(space.index.blocks.__contains__, hashes[end : most_blocks + 1])
            )
            if not blocks or not is_longer or not all(self._disk.contains(space, hashes[half : end + 1])):
                return blocks, MatchEnd.LIMIT, 0
            self.free(self.find_in_memory(space, hashes[end:], len(hashes)).blocks)  # as recently used as the others
        elif ended is not Presence.MISS:
            return blocks, ENDED[ended], 0
        why, rest = MatchEnd.ALL, hashes[end:]
        num_stored = 0
        for block_hash, is_stored in zip(rest, self._disk.contains(space, rest), strict=True):
            presence = space.index.presence(block_hash)
            is_there = is_stored or block_hash in elsewhere.found
            if presence is Presence.PENDING:
                why = MatchEnd.PENDING
            elif presence is Presence.MISS and not is_there:
                why = self._why_absent(space, block_hash, elsewhere)
            elif is_cut and not is_there:  # it might be evicted before it is matched
                why = MatchEnd.LIMIT
            else:
                num_stored += 1
                continue
            break
        if num_stored and end > half and (is_cut or all(self._disk.contains(space, hashes[half:end]))):
            self.free(blocks[half:])
            del blocks[half:]
            num_stored += end - half
        return blocks, why, num_stored

    def wait(self, blocks: Sequence[Block], count: int, timeout_s: float, num_ready: int) -> int:
        """Wait until the first `count` blocks are READY; the first `num_ready` are known to be.

        Returns the number of leading READY blocks, which may exceed `count`.
        """
        deadline = self._clock() + timeout_s
        end = min(count, len(blocks))
        is_in_time = True
        while True:
            while num_ready < len(blocks) and blocks[num_ready].is_ready:
                num_ready += 1
            if num_ready >= end or blocks[num_ready].state is not BlockState.LOADING or not is_in_time:
                return num_ready
            # Wait for the last block only: waking clients for every block would slow the disk's threads.
            last = next(block for block in reversed(blocks[num_ready:end]) if block.state is BlockState.LOADING)
            is_in_time = self._wait_for(last, deadline)

    def _wait_for(self, block: Block, deadline: float) -> bool:
        """Wait until `block` is loaded or its load fails; False past the deadline. Releases the lock meanwhile."""
        event = threading.Event()
        self._awaited.setdefault(block, []).append(event)
        self._lock.release()
        try:
            return event.wait(max(0.0, deadline - self._clock()))
        finally:
            self._lock.acquire()
            waiting = self._awaited.get(block)
            if waiting is not None and event in waiting:
                waiting.remove(event)
                if not waiting:
                    del self._awaited[block]

    def _why_absent(self, space: MemorySpace, block_hash: BlockHash, elsewhere: Elsewhere) -> MatchEnd:
        """Why a match ended at a hash that is not in memory."""
        if (reason := elsewhere.why_absent(block_hash)) is not None:
            return reason
        flags = self._disk.presence(space.namespace, [block_hash])[0]
        if flags & LISTED_DISK:
            return MatchEnd.LIMIT  # the block is on disk, but no memory is left to load it into
        if self.ghosts.has(block_hash, space.index.scope):
            return MatchEnd.EVICTED  # evicted before it was stored, so a disk that is down cannot have it
        return match_end_of(flags)

    def _load(self, space: MemorySpace, store: DiskStore, stored: Sequence[StoredBlock]) -> list[Block]:
        """Start to load the leading blocks of `stored`, as many as memory has room for. Returns them, referenced."""
        blocks = self.pool.reserve(space.index, [each.hash for each in stored], state=BlockState.LOADING).blocks
        self.pool.reference(blocks)  # one for the client, one for the reader
        self.num_loading += len(blocks)
        for block in blocks:
            assert isinstance(block, MemoryBlock)
            block.reused_in = space
        self._disk.load(store, stored, blocks)
        return blocks

    def _fetch(self, space: MemorySpace, hashes: Hashes, elsewhere: Elsewhere) -> list[Block]:
        """Like `_load`, from the cluster: the leading blocks that the cluster has and memory lacks."""
        present = space.index.blocks
        wanted: dict[BlockHash, None] = {}
        for block_hash in hashes:
            if block_hash in present or block_hash in wanted or block_hash not in elsewhere.found:
                break
            wanted[block_hash] = None
        blocks = self.pool.reserve(space.index, list(wanted), state=BlockState.LOADING).blocks
        self.pool.reference(blocks)  # one for the client, one for the reader
        self.num_loading += len(blocks)
        self._cluster.load(space, blocks)
        return blocks

    # --- writing and forgetting ------------------------------------------------------------------------------------

    def reserve(self, space: MemorySpace, hashes: Hashes, max_blocks: int, *, may_decline: bool = True) -> Grant:
        """Reserve slots for the blocks that are neither in memory nor on disk."""
        absent, positions = self._disk.to_write(space, hashes)
        if not self._keeps_stored:
            self._wait_for_room(min(len(absent), max_blocks) * space.index.block_units)
        grant = self.pool.reserve(space.index, absent, max_blocks, may_decline=may_decline)
        return replace(
            grant,
            positions=[positions[position] for position in grant.positions],
            num_ready=grant.num_ready + len(hashes) - len(absent),
        )

    def _wait_for_room(self, units: int) -> None:
        """If memory is only a buffer before the disk, let the writer wait up to `_ROOM_S` for the disk to catch up."""
        deadline = self._clock() + _ROOM_S
        wanted = min(units, self.pool.num_units // 2)
        while self.pool.free_units < wanted and self._changed.wait(max(0.0, deadline - self._clock())):
            pass

    def commit(self, space: MemorySpace, blocks: Sequence[Block]) -> int:
        fresh = [block for block in blocks if isinstance(block, MemoryBlock) and not block.is_ready]
        num_committed = self.pool.commit(blocks)
        self._disk.note_committed(space, fresh)
        self._cluster.note_committed(space, fresh)
        self._sealer.queue(space, fresh)
        return num_committed

    def free(self, blocks: Sequence[Block]) -> None:
        self.pool.free(blocks)
        self._leave_memory(blocks)

    def _leave_memory(self, blocks: Sequence[Block]) -> None:
        """If the server keeps nothing in memory, drop the blocks that are on disk and unreferenced."""
        if self._keeps_stored:
            return
        for block in blocks:
            if isinstance(block, MemoryBlock) and block.is_stored and block.is_ready and not block.num_refs:
                self.pool.drop(block.index, [block.hash])

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        """Forget `hashes` in memory. Waits for blocks being written to disk, so that they can be dropped there."""
        found = list(filter(None, map(space.index.blocks.get, hashes)))
        num_dropped = self.pool.drop(space.index, hashes)
        for block_hash in hashes:
            self.ghosts.discard(block_hash, space.index.scope)
        self._num_dropping += 1
        try:
            self._changed.wait_for(lambda: not any(block.is_held for block in found), _ROOM_S)
        finally:
            self._num_dropping -= 1
        return num_dropped

    def store_again(self, space: MemorySpace, hashes: Hashes) -> None:
        """After a drop of `hashes` on disk, queue those that clients have set again meanwhile."""
        for block in filter(None, map(space.index.blocks.get, hashes)):
            if isinstance(block, MemoryBlock) and block.is_stored and block.is_ready and not block.is_queued:
                block.is_stored = False
                self._disk.queue(space, [block])

    def _note_evicted(self, block: Block) -> None:
        assert isinstance(block, MemoryBlock)
        if not block.is_stored:  # a stored block is not lost: the disk notes its eviction
            self.ghosts.add(block.hash, block.index.scope)

    # --- the disk's threads, without the lock ----------------------------------------------------------------------

    def begin_storing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        with self._lock:
            held = []
            for block in blocks:
                if block.is_ready:
                    self.pool.hold(block)
                    held.append(block)
                else:
                    block.is_queued = False
            return held

    def drop_altered(self, blocks: Sequence[MemoryBlock]) -> int:
        """Forget blocks whose bytes changed after their commit. Their copies on disk stay as they were."""
        with self._lock:
            num_dropped = 0
            for block in blocks:
                if block.index.blocks.get(block.hash) is block:
                    num_dropped += self.pool.drop(block.index, [block.hash])
            self.num_altered += num_dropped
        if num_dropped:
            self._log.warning(
                "altered", "dropped %d blocks that were written to after they were committed", num_dropped
            )
        return num_dropped

    def refuse(self, blocks: Sequence[MemoryBlock]) -> None:
        with self._lock:
            if not self._keeps_stored:  # only the disk's writers free memory here: a refused block would stay for ever
                for block in blocks:
                    if block.is_ready:
                        self.pool.drop(block.index, [block.hash])
                        self.ghosts.add(block.hash, block.index.scope)

    def end_storing(self, blocks: Sequence[MemoryBlock], stored: Sequence[bool]) -> None:
        with self._lock:
            for block, is_stored in zip(blocks, stored, strict=True):
                block.is_queued = False  # only now: two writers must never hold the same block
                block.is_stored = block.is_stored or is_stored
                self.pool.let_go(block)
            self._leave_memory(blocks)
            if not self._keeps_stored or self._num_dropping:
                self._changed.notify_all()

    def end_loading(self, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None:
        with self._lock:
            for block, has_arrived in zip(blocks, arrived, strict=True):
                block.is_stored = block.is_stored or has_arrived
            self._end_loading(blocks, arrived)
            for block in blocks:
                if (space := block.reused_in) is not None:
                    block.reused_in = None
                    self._cluster.note_worth(space, [block])

    def end_fetching(self, space: MemorySpace, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None:
        with self._lock:
            for block, has_arrived in zip(blocks, arrived, strict=True):
                block.shared_at = time.monotonic() if has_arrived else block.shared_at
            self._end_loading(blocks, arrived)
            fresh = [block for block in blocks if block.is_ready]
            self._disk.note_committed(space, fresh)
            self._sealer.queue(space, fresh)

    def _end_loading(self, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None:
        """End loads; called under the lock."""
        self.num_loading -= len(blocks)
        for block, has_arrived in zip(blocks, arrived, strict=True):
            if has_arrived:
                self.pool.commit([block])
            else:
                self.pool.fail(block)
                # The block was stored again after an earlier eviction and is lost now, which is no eviction.
                self.ghosts.discard(block.hash, block.index.scope)
        for block in blocks:
            for event in self._awaited.pop(block, ()):
                event.set()
        self.free(blocks)
        self._changed.notify_all()

    def begin_sharing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        with self._lock:
            held = [block for block in blocks if block.is_ready]
            for block in blocks:
                block.is_sharing = block.is_ready
            for block in held:
                self.pool.hold(block)
            return held

    def end_sharing(self, blocks: Sequence[MemoryBlock], shared: Sequence[bool]) -> None:
        with self._lock:
            for block, is_shared in zip(blocks, shared, strict=True):
                block.is_sharing = False
                block.shared_at = time.monotonic() if is_shared else block.shared_at
                self.pool.let_go(block)
            if not self._keeps_stored or self._num_dropping:
                self._changed.notify_all()

    def share_what_leaves(self) -> None:
        with self._lock:
            for space, blocks in _leaving(self.pool, self._namespaces).items():
                self._cluster.note_worth(space, blocks)

    def store_what_leaves(self) -> None:
        with self._lock:
            for space, blocks in _leaving(self.pool, self._namespaces).items():
                self._disk.note_valued(space, blocks)

    def unstored(self) -> list[tuple[MemorySpace, MemoryBlock]]:
        with self._lock:
            found = []
            for space in self._namespaces:
                for block in space.index.blocks.values():
                    assert isinstance(block, MemoryBlock)
                    is_wanted = block.is_wanted or block.is_stored
                    block.is_stored = False
                    if block.is_ready and is_wanted and not block.is_queued:
                        found.append((space, block))
            return found


def num_ready(blocks: Sequence[Block]) -> int:
    """The number of leading READY blocks."""
    ready = BlockState.READY
    return next((position for position, block in enumerate(blocks) if block.state is not ready), len(blocks))


def _leaving(pool: BlockPool, namespaces: Namespaces) -> dict[MemorySpace, list[Block]]:
    """The blocks that memory would evict next, by namespace; none unless it is nearly full."""
    if pool.free_units * _NEARLY_FULL > pool.num_units or len(namespaces) > _MAX_SWEPT_SPACES:
        return {}
    space_of = {space.index: space for space in namespaces}
    leaving: dict[MemorySpace, list[Block]] = {}
    for block in pool.coldest(_LEAVING_BLOCKS):
        leaving.setdefault(space_of[block.index], []).append(block)
    return leaving
