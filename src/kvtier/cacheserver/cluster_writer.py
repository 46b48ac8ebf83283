"""Writes blocks to a cluster in the background, within bounds on queued bytes, bytes per second and time.

A block that cannot be written is counted and given up; its next use queues it again, at the earliest after some
seconds. Blocks that the cluster has are queued from time to time, too: that renews them there, and brings them back to
a cluster that was restarted empty.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.blocks.block import Block
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.cluster_threads import SLOWEST_BYTES_PER_S, SharedBlockOwner, TaskThreads
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.errors import TierFull
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena

_NUM_WRITERS = 2
_BATCH_BYTES = 4 << 20
_ARENA_SHARE = 32
"""A batch is at most one part in this many of memory, since blocks being written cannot be evicted."""
_QUEUED_BYTES = 256 << 20
_WRITE_S = 1.0
_SWEEP_S = 0.25
_CLOSE_S = 5.0
_RENEWALS_PER_LIFE = 4
_LONGEST_RENEWAL_S = 600.0
_RETRY_S = 10.0
"""Delay before a retry, if the cluster had no room or the block's place was unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """Blocks of one namespace, to be written together."""

    space: MemorySpace
    blocks: Sequence[MemoryBlock]
    nbytes: int


class ClusterWriter:
    """Threads run from `start` to `close`. With `sweeps`, blocks that memory is about to evict are written as well."""

    def __init__(self, spaces: ClusterSpaces, arena: MappedArena, bandwidth: Bandwidth, *, sweeps: bool) -> None:
        self._spaces = spaces
        self._arena = arena
        self._batch_bytes = min(_BATCH_BYTES, arena.nbytes // _ARENA_SHARE)
        self._bandwidth = bandwidth
        self._sweeps = sweeps
        self._renewal_s = min(_LONGEST_RENEWAL_S, spaces.config.ttl_s / _RENEWALS_PER_LIFE)
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._num_written = 0
        self._is_closing = threading.Event()
        self._ends_at = math.inf
        self._owner: SharedBlockOwner
        self._threads: TaskThreads[_Write] | None = None
        self._sweeper = threading.Thread(target=self._sweep, name="kvtier-cluster-sweeper", daemon=True)

    def start(self, owner: SharedBlockOwner) -> None:
        self._owner = owner
        self._threads = TaskThreads("kvtier-cluster-writer", _NUM_WRITERS, self._write)
        if self._sweeps:
            self._sweeper.start()

    def close(self) -> None:
        self._ends_at = time.monotonic() + _CLOSE_S
        self._is_closing.set()
        if self._sweeper.ident is not None:
            self._sweeper.join()
        if self._threads is not None:
            self._threads.close()

    # --- under the catalog's lock: never blocks ----------------------------------------------------------------------

    def queue(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Queue the READY ones of `blocks` that the cluster lacks, or that are due for a renewal."""
        if self._threads is None or self._is_closing.is_set():
            return
        now = time.monotonic()
        renewed_before, tried_before = now - self._renewal_s, now - _RETRY_S
        wanted = [
            block
            for block in blocks
            if isinstance(block, MemoryBlock)
            and block.is_ready
            and not block.is_sharing
            and block.shared_at < renewed_before
            and block.tried_at < tried_before
            and not space.is_table(block)
        ]
        step = max(1, self._batch_bytes // space.block_bytes)
        for first in range(0, len(wanted), step):
            some = wanted[first : first + step]
            nbytes = len(some) * space.block_bytes
            with self._lock:
                if self._queued_bytes and self._queued_bytes + nbytes > _QUEUED_BYTES:
                    break
                self._queued_bytes += nbytes
            for block in some:
                block.is_sharing = True
                block.tried_at = now
            self._threads.put(_Write(space, some, nbytes))
        else:
            return
        self._spaces.note_loss("busy", len(wanted) - first)

    def levels(self) -> dict[str, float]:
        with self._lock:
            return {"cluster_queued_bytes": self._queued_bytes, "cluster_written_blocks": self._num_written}

    # --- the threads -------------------------------------------------------------------------------------------------

    def _write(self, write: _Write) -> None:
        blocks = self._owner.begin_sharing(write.blocks)
        shared = [False] * len(blocks)
        num_sent = 0
        try:
            if time.monotonic() < self._ends_at:
                shared, num_sent = self._share(write.space, blocks)
            num_lost = len(write.blocks) - sum(shared)
            if num_lost:
                self._spaces.note_loss("not written", num_lost)
        finally:
            self._owner.end_sharing(blocks, shared)
            with self._lock:
                self._queued_bytes -= write.nbytes
        if any(shared):  # without holding a block
            self._spaces.describe(write.space)
        wait_s = self._bandwidth.spend(num_sent * write.space.block_bytes)
        if wait_s:  # without holding a block
            self._is_closing.wait(wait_s)

    def _share(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> tuple[list[bool], int]:
        """Whether each of `blocks` is in the cluster now, and how many were sent: none of unknown place."""
        cluster = self._spaces.of(space)
        placed = [at for at, block in enumerate(blocks) if cluster.places.get(block.hash) is not None]
        shared = [False] * len(blocks)
        if not placed:
            return shared, 0
        found = cluster.touch([blocks[at].hash for at in placed], self._spaces.config.timeout_s + _WRITE_S)
        absent = []
        for at, is_there in zip(placed, found, strict=True):
            shared[at] = is_there is True
            if is_there is False:
                absent.append(at)
        for at, is_written in zip(absent, self._put(space, [blocks[at] for at in absent]), strict=True):
            shared[at] = is_written
        return shared, len(absent)

    def _put(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> list[bool]:
        if not blocks:
            return []
        nbytes = len(blocks) * space.block_bytes
        views = [self._arena.view(block.start * SLOT_ALIGN_BYTES, space.block_bytes) for block in blocks]
        timeout_s = self._spaces.config.timeout_s + _WRITE_S + nbytes / SLOWEST_BYTES_PER_S
        checksums = [_sealed(space, block, view) for block, view in zip(blocks, views, strict=True)]
        try:
            written = self._spaces.of(space).put([block.hash for block in blocks], views, timeout_s, checksums)
        except TierFull:
            self._spaces.note_loss("full", len(blocks))
            return [False] * len(blocks)
        with self._lock:
            self._num_written += sum(written)
        return written

    def _sweep(self) -> None:
        while not self._is_closing.wait(_SWEEP_S):
            if self._queued_bytes < _QUEUED_BYTES // 2:
                self._owner.share_what_leaves()


def _sealed(space: MemorySpace, block: MemoryBlock, view: memoryview) -> int:
    """The block's checksum; computed now if it has none."""
    if block.checksum is None:
        block.checksum = checksum_of(space.namespace, block.hash, view)
    return block.checksum
