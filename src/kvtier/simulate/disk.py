"""A simulated disk of a cache server: its pool, its policy and its admission, without bytes.

Reads and writes complete at once. It has those methods of `persistence.Persistence` that run under the catalog's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from kvtier.blocks.block import Block, PrefixIndex, Presence
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.pool import BlockPool
from kvtier.cacheserver.disk_admission import DiskAdmission
from kvtier.cacheserver.memory_policy import Policy, memory_policy
from kvtier.cacheserver.namespaces import Hashes, MemoryBlock, MemorySpace
from kvtier.cacheserver.persistence import NoDisk, StoredRun
from kvtier.stores.disk import DiskStore
from kvtier.stores.stored_block import StoredBlock

_NO_STORE = cast("DiskStore", None)
"""Stands in for the store in a `StoredRun`: there is no real one."""


class SimulatedDisk(NoDisk):
    """At most `num_blocks` of one namespace. `on_loaded` is called with blocks that were read into memory."""

    def __init__(
        self,
        num_blocks: int,
        eviction: Eviction,
        admission: DiskAdmission,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        policy = eviction_policy(eviction, declines=False, clock=clock)
        self._pool = BlockPool(num_blocks, policy, make=StoredBlock, clock=clock)
        self._index = PrefixIndex(1)
        self._block_bytes = block_bytes
        self.admission = admission
        self.on_loaded: Callable[[Sequence[MemoryBlock]], None] = lambda blocks: None
        self.num_written = 0
        self.num_read = 0

    def eviction_policy(
        self, eviction: Eviction, clock: Callable[[], float], *, evicts_unsafe: bool, declines: bool
    ) -> Policy:
        return memory_policy(eviction, clock, evicts_unsafe=evicts_unsafe, on_unsafe=lambda block: None)

    def match(self, space: MemorySpace, hashes: Hashes, first: int, end: int) -> StoredRun | None:
        present = space.index.blocks
        wanted = []
        for block_hash in hashes[first:end]:
            if block_hash in present:
                break
            wanted.append(block_hash)
        stored = cast("list[StoredBlock]", self._pool.match(self._index, wanted).blocks)
        return (_NO_STORE, stored) if stored else None

    def load(self, store: DiskStore, stored: Sequence[StoredBlock], blocks: Sequence[Block]) -> None:
        self._pool.free(stored)
        self.num_read += len(blocks)
        self.on_loaded(cast("Sequence[MemoryBlock]", blocks))

    def contains(self, space: MemorySpace, hashes: Hashes) -> list[bool]:
        return [self._index.presence(block_hash) is Presence.READY for block_hash in hashes]

    def to_write(self, space: MemorySpace, hashes: Hashes) -> tuple[Hashes, Sequence[int]]:
        stored, present = self._index.blocks, space.index.blocks
        positions = [at for at, each in enumerate(hashes) if each not in stored or each in present]
        return [hashes[position] for position in positions], positions

    def touch(self, hashes: Hashes) -> None:
        """Note that a prompt was used, from memory, from disk, or both."""
        found = self._index.blocks
        self._pool.touch([block for each in hashes if (block := found.get(each)) is not None])

    def note_committed(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None:
        if blocks and self.admission.takes_new(len(blocks)):
            self._write(blocks)

    def note_reused(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        if self.admission.looks_at_reused:
            self.note_valued(space, blocks)

    def note_valued(self, space: MemorySpace, blocks: Sequence[Block]) -> bool:
        wanted = [block for block in blocks if isinstance(block, MemoryBlock) and not block.is_stored]
        if not wanted or not self.admission.takes_valued:
            return False
        self._write(wanted)
        return True

    def _write(self, blocks: Sequence[MemoryBlock]) -> None:
        hashes: list[BlockHash] = [block.hash for block in blocks]
        granted = self._pool.reserve(self._index, hashes).blocks
        self._pool.commit(granted)
        self._pool.free(granted)
        self.admission.spend(len(granted) * self._block_bytes)
        self.num_written += len(granted)
        for block in blocks:
            block.is_stored = True
