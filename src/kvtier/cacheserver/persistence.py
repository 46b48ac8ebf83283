"""The server's disk: writes committed blocks in the background, loads them again, and survives failures of the disk.

Only `flush` waits for the writers. Readers fill slots of the arena that a match has reserved. A keeper thread saves
recency, notices when the folder disappears, and reopens the store when it can.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvtier.blocks.block import Block
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.retention import Retention
from kvtier.cacheserver.disk_admission import DiskAdmission
from kvtier.cacheserver.disk_threads import BlockOwner, DiskReader, DiskWriter
from kvtier.cacheserver.memory_policy import Policy, memory_policy
from kvtier.cacheserver.namespaces import Hashes, MemoryBlock, MemorySpace
from kvtier.cacheserver.recovering_store import RecoveringStore
from kvtier.cacheserver.refusals import Refusals
from kvtier.errors import TierError, TierRefused, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.stores.disk import DiskStore
from kvtier.stores.stored_block import StoredBlock, StoreSpace
from kvtier.wire.messages import LISTED_DISK, LISTED_DOWN, LISTED_EVICTED, LISTED_PINNED

_MAX_RECENT = 1024
_KEEPER_INTERVAL_S = 1.0
_LAST_RETRY_S = 30.0
_REGROWTH_S = 30.0

StoredRun: TypeAlias = tuple[DiskStore, list[StoredBlock]]


class Persistence:
    """One folder. Threads start with `start` and end with `close`. `admission` decides what is written, and when."""

    def __init__(self, store: RecoveringStore, arena: MappedArena, *, fsync: bool, admission: DiskAdmission) -> None:
        self._store = store
        self.refusals = Refusals()
        self._admission = admission
        self._writer = DiskWriter(self._store, arena, self.refusals, admission)
        self._reader = DiskReader(self._store, arena)
        self._fsync = fsync
        self._recent: OrderedDict[BlockHash, tuple[MemorySpace, Hashes]] = OrderedDict()
        self._keeper = threading.Thread(target=self._run_keeper, name="kvtier-disk-keeper", daemon=True)
        self._owner: BlockOwner

    def start(self, owner: BlockOwner) -> None:
        self._owner = owner
        self._writer.start(owner)
        self._reader.start(owner)
        self._keeper.start()

    # --- called by the catalog, under its lock: never blocks -------------------------------------------------------

    def eviction_policy(
        self, eviction: Eviction, clock: Callable[[], float], *, evicts_unsafe: bool, declines: bool
    ) -> Policy:
        """The policy for memory. `declines` is ignored: blocks reach the disk through memory, so it takes them all."""
        return memory_policy(eviction, clock, evicts_unsafe=evicts_unsafe, on_unsafe=self._writer.note_gone)

    def match(self, space: MemorySpace, hashes: Hashes, first: int, end: int) -> StoredRun | None:
        """Reference the stored prefix of `hashes[first:end]`, up to a hash that is in memory or occurred before."""
        found = self._store.find(space)
        if found is None:
            return None
        present = space.index.blocks
        wanted: dict[BlockHash, None] = {}
        for block_hash in itertools.islice(hashes, first, end):
            if block_hash in present or block_hash in wanted:
                break
            wanted[block_hash] = None
        stored = found[0].match(found[1], list(wanted))
        return (found[0], stored) if stored else None

    def load(self, store: DiskStore, stored: Sequence[StoredBlock], blocks: Sequence[Block]) -> None:
        """Read the leading `stored` blocks into `blocks`; free the others."""
        store.free(stored[len(blocks) :])
        self._reader.queue(store, stored[: len(blocks)], blocks)

    def contains(self, space: MemorySpace, hashes: Hashes) -> list[bool]:
        found = self._store.find(space)
        return [False] * len(hashes) if found is None else found[0].contains(found[1], hashes)

    def to_write(self, space: MemorySpace, hashes: Hashes) -> tuple[Hashes, Sequence[int]]:
        """The hashes to write, and their positions: all but those on disk and not in memory."""
        positions = [
            position
            for position, is_stored in enumerate(self.contains(space, hashes))
            if not is_stored or hashes[position] in space.index.blocks
        ]
        return [hashes[position] for position in positions], positions

    def presence(self, namespace: Namespace, hashes: Hashes) -> list[int]:
        """LISTED_ flags for each hash: on disk, and pinned; evicted from disk; or unknown because the disk is down."""
        store = self._store.current
        if store is None:
            return [LISTED_DOWN] * len(hashes)
        space = store.find(namespace)
        pins = [None] * len(hashes) if space is None else store.pins(space, hashes)
        return [
            listed_on_disk(is_pinned) or (LISTED_EVICTED if was_here else 0)
            for is_pinned, was_here in zip(pins, store.was_evicted(namespace, hashes), strict=True)
        ]

    def queue(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None:
        """Queue blocks to be written in the background."""
        self._writer.queue(space, blocks)

    def note_committed(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None:
        """Note that the READY ones of `blocks` have just been committed."""
        ready = [block for block in blocks if block.is_ready]
        if ready and self._admission.takes_new(len(ready)):
            self._writer.queue(space, ready)

    def note_reused(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Note that a prefix was matched in memory."""
        if self._admission.looks_at_reused and self.note_valued(space, blocks):
            self._writer.order(space, [block.hash for block in blocks])

    def note_valued(self, space: MemorySpace, blocks: Sequence[Block]) -> bool:
        """Queue blocks that are reused, or would be evicted from memory next, if they were withheld so far.

        Returns whether any block was queued; none is if the budget is spent.
        """
        wanted = [
            block
            for block in blocks
            if isinstance(block, MemoryBlock) and block.is_ready and not block.is_stored and not block.is_queued
        ]
        if not wanted or not self._admission.takes_valued:
            return False
        self._writer.queue(space, wanted)
        return True

    def order(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Note that blocks queued in this order are one prompt, whose end is to be evicted before its beginning."""
        self._writer.order(space, [block.hash for block in blocks])

    def note_used(self, space: MemorySpace, hashes: Hashes, count: int) -> None:
        """Note that the first `count` blocks were used. The disk's recency is updated later, for many uses at once."""
        last = hashes[count - 1]
        with self._store.condition:
            self._recent[last] = (space, hashes[:count])
            self._recent.move_to_end(last)
            if len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)

    def pin(self, space: MemorySpace, hashes: Hashes, *, keep: bool) -> int:
        found = self._store.find(space)
        act = DiskStore.pin if keep else DiskStore.unpin
        return 0 if found is None else act(*found, hashes)

    def retain(self, space: MemorySpace, hashes: Hashes, retention: Retention) -> int:
        """Like `Retentions.retain`. If blocks may be withheld from the disk, only the stored prefix is retained."""
        found = self._store.find(space)
        if found is None:
            return 0
        if self._admission.looks_at_reused:
            stored = found[0].contains(found[1], hashes)
            hashes = hashes[: stored.index(False)] if False in stored else hashes
        return found[0].retain(found[1], hashes, retention)

    def end_retention(self, space: MemorySpace, hashes: Hashes, account: str) -> int:
        found = self._store.find(space)
        return 0 if found is None else found[0].end_retention(found[1], hashes, account)

    def stored_space(self, namespace: Namespace) -> StoreSpace | None:
        """The disk's record of a namespace that has, or may have, blocks there."""
        store = self._store.current
        return None if store is None else store.find(namespace)

    def blocks(self, space: MemorySpace) -> list[tuple[BlockHash, bool]]:
        """The hashes of the stored blocks, and whether each is pinned."""
        found = self._store.find(space)
        return [] if found is None else found[0].blocks(found[1])

    def spaces(self) -> list[StoreSpace]:
        store = self._store.current
        return [] if store is None else [space for space in store.spaces() if len(space.index)]

    def levels(self) -> dict[str, float]:
        store = self._store.current
        levels = {} if store is None else store.levels()
        return {
            "disk_up": float(store is not None),
            "disk_queued_blocks": self._writer.num_queued,
            "disk_written_blocks": self._writer.num_written,
            "disk_read_blocks": self._reader.num_read,
            **self._admission.levels(),
            **{f"disk_{name}": value for name, value in levels.items()},
        }

    # --- called without a lock -------------------------------------------------------------------------------------

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        """Drop `hashes`, or the whole namespace if empty."""
        return self._store.drop(space, hashes or None)

    def verify(self, space: MemorySpace, hashes: Hashes) -> list[bool]:
        """For each of `hashes`, whether it is intact on disk, or absent. Raises `TierUnavailable`."""
        with self._store.using() as store:
            stored_space = None if store is None else self._store.space_of(store, space)
            if store is None or stored_space is None:
                raise TierUnavailable("the disk is down, so its blocks cannot be verified")
            return [store.verify(stored_space, block_hash) for block_hash in hashes]

    @contextlib.contextmanager
    def leaving(self, count: int) -> Iterator[tuple[DiskStore, list[StoredBlock]] | None]:
        """The store and the blocks it would evict next if it is nearly full, held meanwhile; None while it is down.

        Does not raise if the store fails.
        """
        with contextlib.suppress(TierUnavailable), self._store.using() as store:
            if store is None:
                yield None
                return
            blocks = store.hold_leaving(count)
            try:
                yield store, blocks
            finally:
                store.let_go(blocks)

    def flush(self, timeout_s: float) -> None:
        """Wait until all blocks committed before the call are on disk, except those that the disk refused.

        Raises `TierUnavailable`, and `TierTimeout`.
        """
        num_outages = self._store.num_outages
        self._writer.wait(self._writer.last_number, timeout_s)
        with self._store.using() as store:
            if store is None or self._store.num_outages != num_outages:
                raise TierUnavailable("the disk is down: blocks in memory were not written to it")
            self._tell_used(store)
            store.flush(fsync=self._fsync)

    def losses(self) -> dict[str, int]:
        """Blocks lost and failures, by kind."""
        return self._store.losses()

    def close(self) -> None:
        """Write the queued blocks if the disk works, and release the folder."""
        with contextlib.suppress(TierError):
            self.flush(timeout_s=60.0)
        with self._store.condition:
            self._store.is_closing = True
            self._store.condition.notify_all()
        self._writer.close()
        self._reader.close()
        if self._keeper.ident is not None:
            self._keeper.join()
        self._store.close()

    # --- the keeper ------------------------------------------------------------------------------------------------

    def _run_keeper(self) -> None:
        condition = self._store.condition
        retry_s = _KEEPER_INTERVAL_S
        retry_at = time.monotonic()
        regrow_at = time.monotonic() + _REGROWTH_S
        while True:
            with condition:
                if condition.wait_for(lambda: self._store.is_closing, _KEEPER_INTERVAL_S):
                    return
            if self._store.current is None:
                if time.monotonic() >= retry_at:
                    self._store.reopen(self._queue_unstored)
                    retry_at = time.monotonic() + retry_s
                    retry_s = min(2 * retry_s, _LAST_RETRY_S)  # grows even if the disk fails as soon as it is up
                continue
            retry_s = _KEEPER_INTERVAL_S
            with contextlib.suppress(TierUnavailable), self._store.using() as store:
                if store is None:
                    continue
                if time.monotonic() > regrow_at:
                    regrow_at = time.monotonic() + _REGROWTH_S
                    store.try_growing_again()
                if not store.is_in_place():
                    raise OSError(None, "its folder or file has disappeared")
                self._tell_used(store)
                store.save_recency()
            if self._admission.looks_at_leaving:
                self._owner.store_what_leaves()

    def _queue_unstored(self) -> None:
        for space, block in self._owner.unstored():
            self._writer.queue(space, [block])

    def _tell_used(self, store: DiskStore) -> None:
        with self._store.condition:
            recent, self._recent = self._recent, OrderedDict()
        for space, hashes in recent.values():
            stored_space = self._store.space_of(store, space)
            if stored_space is not None:
                store.touch(stored_space, hashes)


class NoDisk:
    """Stores nothing and finds nothing; see `Persistence`."""

    refusals = Refusals()

    def start(self, owner: BlockOwner) -> None: ...

    def close(self) -> None: ...

    def flush(self, timeout_s: float) -> None: ...

    @contextlib.contextmanager
    def leaving(self, count: int) -> Iterator[tuple[DiskStore, list[StoredBlock]] | None]:
        yield None

    def queue(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None: ...

    def order(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def note_committed(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None: ...

    def note_reused(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def note_valued(self, space: MemorySpace, blocks: Sequence[Block]) -> bool:
        return False

    def note_used(self, space: MemorySpace, hashes: Hashes, count: int) -> None: ...

    def load(self, store: DiskStore, stored: Sequence[StoredBlock], blocks: Sequence[Block]) -> None: ...

    def match(self, space: MemorySpace, hashes: Hashes, first: int, end: int) -> StoredRun | None:
        return None

    def contains(self, space: MemorySpace, hashes: Hashes) -> list[bool]:
        return [False] * len(hashes)

    def to_write(self, space: MemorySpace, hashes: Hashes) -> tuple[Hashes, Sequence[int]]:
        return hashes, range(len(hashes))

    def presence(self, namespace: Namespace, hashes: Hashes) -> list[int]:
        return [0] * len(hashes)

    def pin(self, space: MemorySpace, hashes: Hashes, *, keep: bool) -> int:
        return 0

    def retain(self, space: MemorySpace, hashes: Hashes, retention: Retention) -> int:
        return 0

    def end_retention(self, space: MemorySpace, hashes: Hashes, account: str) -> int:
        return 0

    def drop(self, space: MemorySpace, hashes: Hashes) -> int:
        return 0

    def blocks(self, space: MemorySpace) -> list[tuple[BlockHash, bool]]:
        return []

    def stored_space(self, namespace: Namespace) -> StoreSpace | None:
        return None

    def spaces(self) -> list[StoreSpace]:
        return []

    def verify(self, space: MemorySpace, hashes: Hashes) -> list[bool]:
        raise TierRefused("this server has no disk to verify")

    def levels(self) -> dict[str, float]:
        return {}

    def losses(self) -> dict[str, int]:
        return {}

    def eviction_policy(
        self, eviction: Eviction, clock: Callable[[], float], *, evicts_unsafe: bool, declines: bool
    ) -> Policy:
        return eviction_policy(eviction, declines=declines, clock=clock)


Disk: TypeAlias = Persistence | NoDisk
NO_DISK = NoDisk()


def listed_on_disk(is_pinned: bool | None) -> int:
    """LISTED_ flags of a block on disk; None for one that is not there."""
    return 0 if is_pinned is None else LISTED_DISK | (LISTED_PINNED if is_pinned else 0)
