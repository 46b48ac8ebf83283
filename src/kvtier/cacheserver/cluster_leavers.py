"""Writes blocks that a disk is about to evict to the cluster: a thread reads the coldest blocks ahead of eviction.

It takes only blocks that the cluster lacks and whose places in their prompts the server still knows. They are read into
separate memory: cold blocks must not push warm ones out of the arena. Best effort: if the disk evicts faster than the
cluster accepts, blocks are lost, as they would be without this thread.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence

from kvtier.blocks.layout import slot_bytes_of
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.cluster_threads import SLOWEST_BYTES_PER_S
from kvtier.cacheserver.persistence import Disk
from kvtier.errors import TierFull
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.stored_block import StoredBlock, StoreSpace

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LEAVING_BLOCKS = 256
_BATCH_BYTES = 4 << 20
_CALL_S = 1.0
_MAX_KNOWN = 1 << 14


class DiskLeavers:
    """A thread from `start` to `close`."""

    def __init__(self, spaces: ClusterSpaces, bandwidth: Bandwidth) -> None:
        self._spaces = spaces
        self._bandwidth = bandwidth
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._known: dict[int, int] = {}
        """Blocks already looked at: their last use, by their number."""
        self._log = LogLimit(logger)
        self.num_written = 0

    def start(self, disk: Disk) -> None:
        self._thread = threading.Thread(target=self._run, args=(disk,), name="kvtier-cluster-leavers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, disk: Disk) -> None:
        pause_s = 0.0
        while not self._is_closing.wait(pause_s):
            pause_s = _LOOK_S
            try:
                batch = self._next_batch(disk)
                if batch is not None:
                    pause_s = self._bandwidth.spend(self._pass_on(disk, *batch))
            except Exception as error:  # the thread must survive any failure
                self._spaces.note_loss("not written", 1)
                self._log.warning("failed", "cluster: blocks that leave the disk were not written: %s", str(error))

    def _next_batch(self, disk: Disk) -> tuple[StoreSpace, list[StoredBlock]] | None:
        """Blocks of one namespace not looked at before; None if there are none. They are no longer held."""
        batch: list[StoredBlock] = []
        with disk.leaving(_LEAVING_BLOCKS) as found:
            for block in () if found is None else found[1]:
                if self._known.get(block.sequence) == block.used_at:
                    continue
                if batch and (
                    block.space is not batch[0].space or (len(batch) + 1) * block.space.block_bytes > _BATCH_BYTES
                ):
                    continue
                batch.append(block)
                self._known[block.sequence] = block.used_at
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return (batch[0].space, batch) if batch else None

    def _pass_on(self, disk: Disk, space: StoreSpace, blocks: Sequence[StoredBlock]) -> int:
        """Write the blocks that the cluster lacks. Returns the bytes written. A cluster's failure is not the disk's."""
        cluster = self._spaces.of(space)
        placed = [block for block in blocks if cluster.places.get(block.hash) is not None]
        timeout_s = self._spaces.config.timeout_s + _CALL_S
        found = cluster.contains([block.hash for block in placed], timeout_s)
        absent = [block for block, is_there in zip(placed, found, strict=True) if is_there is False]
        if not absent:
            return 0
        slot_bytes = slot_bytes_of(space.block_bytes)
        with mmap.mmap(-1, len(absent) * slot_bytes) as memory, memoryview(memory) as whole:
            slots = [whole[first : first + slot_bytes] for first in range(0, len(whole), slot_bytes)]
            payloads = [slot[: space.block_bytes] for slot in slots]
            try:
                read = _read(disk, absent, slots)
                nbytes = len(read) * space.block_bytes
                hashes = [absent[at].hash for at in read]
                written = cluster.put(hashes, [payloads[at] for at in read], timeout_s + nbytes / SLOWEST_BYTES_PER_S)
            except TierFull:
                self._spaces.note_loss("full", len(absent))
                return nbytes
            finally:
                for view in (*payloads, *slots):
                    view.release()
        self.num_written += sum(written)
        if not all(written):
            self._spaces.note_loss("not written", written.count(False))
        return nbytes


def _read(disk: Disk, blocks: Sequence[StoredBlock], slots: Sequence[memoryview]) -> list[int]:
    """Positions of the `blocks` that were read: those still about to be evicted, and intact."""
    read: list[int] = []
    with disk.leaving(_LEAVING_BLOCKS) as found:
        if found is None:
            return []
        store, leaving = found
        held = {block.sequence for block in leaving}
        there = [at for at, block in enumerate(blocks) if block.sequence in held]
        damages = store.read([blocks[at] for at in there], [slots[at] for at in there])
        read = [at for at, damage in zip(there, damages, strict=True) if damage is None]
    return read
