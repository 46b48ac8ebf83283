"""Host memory of this process as a tier: an arena of its own and a pool of equal blocks. Thread-safe.

One short lock around the pool; bytes are copied outside it, into slots that are not visible yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.blocks.block import ENDED, Block, PrefixIndex, Presence
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.ghosts import Ghosts
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.pool import BlockPool
from kvtier.blocks.prompt_share import prompt_share
from kvtier.blocks.retention import Granted, Retention
from kvtier.errors import ConfigError, TierFull
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import BlockLease, EmptyLease, Lease, Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.sizes import format_size
from kvtier.tiers.retention import RetentionAsk
from kvtier.tiers.tier import PlainTier

_RETAINED_PART = 4
"""One block in this many may be retained."""


class HostTier(PlainTier):
    """At most `memory_bytes` of blocks. Memory is taken from the system as it is first used.

    With `declines`, it may refuse blocks worth less than those it has; not allowed if slower tiers are fed from it.
    """

    answers_at_once = True

    def __init__(
        self,
        layout: KvLayout,
        memory_bytes: int,
        name: str = "host",
        *,
        eviction: Eviction = "lru",
        declines: bool = False,
    ) -> None:
        num_blocks = memory_bytes // layout.slot_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"{format_size(memory_bytes)} of host memory holds no block of {format_size(layout.slot_bytes)}"
            )
        self.name = name
        self.layout = layout
        self._arena = MappedArena.create(num_blocks * layout.slot_bytes)
        self._lock = threading.Lock()
        self._ghosts = Ghosts()
        policy = eviction_policy(eviction, declines=declines, clock=time.monotonic)
        self._pool = BlockPool(num_blocks, policy, on_evict=lambda block: self._ghosts.add(block.hash))
        self._index = PrefixIndex(1)
        self._forgotten: deque[list[Block]] = deque()

    @property
    def is_local(self) -> bool:
        return True

    @property
    def arena(self) -> MappedArena:
        """The memory of all its blocks."""
        return self._arena

    @property
    def staging(self) -> HostTier:
        return self

    @property
    def num_blocks(self) -> int:
        return self._pool.num_units

    @property
    def most_prompt_blocks(self) -> int:
        return prompt_share(self._pool.num_units)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.free_units

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        with self._lock:
            self._free_forgotten()
            match = self._pool.match(self._index, hashes)
            ended = self._ghosts.ending(match, hashes)
        return self._lease(hashes, match.blocks, ended, self._pool.free)

    def hold(self, hashes: Sequence[BlockHash]) -> Lease:
        with self._lock:
            self._free_forgotten()
            blocks: list[Block] = []
            ended = MatchEnd.ALL
            for block_hash in hashes:
                presence = self._index.presence(block_hash)
                if presence is not Presence.READY:
                    ended = ENDED[presence]
                    break
                blocks.append(self._index.blocks[block_hash])
            self._pool.reference(blocks)
        return self._lease(hashes, blocks, ended, self._pool.free_unused)

    def _lease(
        self, hashes: Sequence[BlockHash], blocks: list[Block], ended: MatchEnd, free: Callable[[list[Block]], None]
    ) -> Lease:
        if not blocks:
            return EmptyLease(ended)

        def release() -> None:
            with self._lock:
                free(blocks)

        return BlockLease(
            self._arena,
            self._offsets(blocks),
            self.layout.block_bytes,
            hashes[: len(blocks)],
            ended,
            _never_pulled,
            lambda count: count,
            len(blocks),
            release,
            lambda: self._forgotten.append(blocks),
        )

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots for the absent ones of `hashes`, to be written in place. Raises `TierFull` if it has room for none."""
        with self._lock:
            self._free_forgotten()
            grant = self._pool.reserve(self._index, hashes)
        blocks = grant.blocks
        if grant.num_refused and not blocks:
            why = "its blocks are worth more" if grant.num_declined else "all of it is leased"
            raise TierFull(f"no room for {grant.num_refused} blocks in the {self.name} tier: {why}")

        def commit(first: int, count: int) -> int:
            with self._lock:
                return self._pool.commit(blocks[first : first + count])

        return Reservation(
            self._arena,
            self._offsets(blocks),
            self.layout.block_bytes,
            grant.positions,
            (grant.num_ready, grant.num_pending, grant.num_refused),
            commit,
            lambda: self._free(blocks),
            lambda: self._forgotten.append(blocks),
        )

    def stage(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots for blocks on their way to another tier, whether they are cached here or not.

        Committed blocks are cached from then on, unless they were already. Raises `TierFull` without room for all.
        """
        with self._lock:
            self._free_forgotten()
            blocks = self._pool.take(len(hashes), 1)
        if len(blocks) < len(hashes):
            raise TierFull(f"no room for {len(hashes)} blocks: all of the {self.name} tier is leased")

        def commit(first: int, count: int) -> int:
            with self._lock:
                return sum(
                    self._pool.name(blocks[position], self._index, hashes[position], is_ready=True)
                    for position in range(first, first + count)
                )

        return Reservation(
            self._arena,
            self._offsets(blocks),
            self.layout.block_bytes,
            range(len(blocks)),
            (0, 0, 0),
            commit,
            lambda: self._free(blocks),
            lambda: self._forgotten.append(blocks),
        )

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        views = byte_views(blocks, self.layout.block_bytes, writable=False)
        with self.reserve(hashes) as reservation:
            reservation.fill([views[position] for position in reservation.positions])
            return reservation.commit()

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        limit = ask.account_bytes // self.layout.slot_bytes if ask.account_bytes else None
        retention = Retention(ask.ttl_s, ask.priority, ask.account, limit)
        with self._lock:
            count = self._pool.retain(self._index, hashes, retention, self.num_blocks // _RETAINED_PART)
        reason = f"retained {count} of {len(hashes)} blocks: the budget for retained blocks is used up"
        return Granted(count, ask.ttl_s, "" if count == len(hashes) else reason)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._lock:
            return [self._index.presence(block_hash) is Presence.READY for block_hash in hashes]

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        with self._lock:
            if hashes is None:
                self._ghosts.clear()
                return self._pool.drop(self._index, list(self._index.blocks))
            for block_hash in hashes:
                self._ghosts.discard(block_hash)
            return self._pool.drop(self._index, hashes)

    def close(self) -> None:
        """Unmap the memory. Raises `LeaseError` while views are in use."""
        self._arena.close()

    def _free(self, blocks: list[Block]) -> None:
        with self._lock:
            self._pool.free(blocks)

    def _free_forgotten(self) -> None:
        while self._forgotten:
            self._pool.free(self._forgotten.popleft())

    def _offsets(self, blocks: list[Block]) -> list[int]:
        slot_bytes = self.layout.slot_bytes
        return [block.start * slot_bytes for block in blocks]


def _never_pulled(hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
    raise AssertionError("a host tier's blocks lie in its arena")
