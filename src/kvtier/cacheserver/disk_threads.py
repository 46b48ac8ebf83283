"""The threads between the arena and the store, and the interface they need of the blocks' owner.

Writers store committed blocks in the background, and keep them queued while the disk is down. Readers fill slots of
the arena that a match has reserved.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.block import Block
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.disk_admission import DiskAdmission
from kvtier.cacheserver.namespaces import Hashes, MemoryBlock, MemorySpace
from kvtier.cacheserver.recovering_store import RecoveringStore
from kvtier.cacheserver.refusals import Refusals
from kvtier.errors import TierError, TierTimeout, TierUnavailable
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena
from kvtier.stores.disk import DiskStore, Written
from kvtier.stores.stored_block import StoredBlock, StoreSpace

_NUM_WRITERS = min(16, 4 * (os.cpu_count() or 1))  # each also computes checksums
_NUM_READERS = min(64, 8 * (os.cpu_count() or 1))  # each also computes checksums, between its reads
_BATCH_BYTES = 2 << 20  # moved by a thread at once: more than a block, less than a prompt
_ORDER_S = 2.0
_ROOM_TRIES = 25
_ROOM_TRY_S = 0.02


class BlockOwner(Protocol):
    """The owner of the arena's blocks. Each method takes the catalog's lock for a moment."""

    def begin_storing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        """Hold the blocks' slots while they are written. Returns the blocks that are still in memory."""

    def drop_altered(self, blocks: Sequence[MemoryBlock]) -> int:
        """Forget blocks whose bytes changed after their commit."""

    def refuse(self, blocks: Sequence[MemoryBlock]) -> None:
        """Note that the disk has no room for these blocks."""

    def end_storing(self, blocks: Sequence[MemoryBlock], stored: Sequence[bool]) -> None: ...

    def end_loading(self, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None: ...

    def store_what_leaves(self) -> None:
        """Queue the blocks that memory will evict next and that were not queued yet, if the disk takes them now."""

    def unstored(self) -> list[tuple[MemorySpace, MemoryBlock]]:
        """After an outage: the blocks in memory that should be on disk, where no block is certain to be now."""


@dataclass(slots=True, eq=False)
class DiskTask:
    """A unit of work. Tasks of the same size and space may be carried out as a batch, up to `_BATCH_BYTES`."""

    space: object
    nbytes: int


_AnyTask = TypeVar("_AnyTask", bound=DiskTask)


class DiskThreads(Generic[_AnyTask]):
    """Threads that `carry_out` batches of queued tasks between the arena and the store, from `start` to `close`."""

    def __init__(self, name: str, count: int, store: RecoveringStore, arena: MappedArena) -> None:
        self._store = store
        self._condition = store.condition
        self._arena = arena
        self._owner: BlockOwner
        # A queue hands each task to one thread; a condition would wake all of them for every block.
        self._queue: SimpleQueue[_AnyTask | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]

    def start(self, owner: BlockOwner) -> None:
        self._owner = owner
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Carry out the queued tasks, then end the threads."""
        started = [thread for thread in self._threads if thread.ident is not None]
        for _ in started:
            self._queue.put(None)
        for thread in started:
            thread.join()

    def _carry_out(self, batch: Sequence[_AnyTask]) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        """Take a task, and with it the waiting tasks of the same size and space, up to a batch."""
        following = self._queue.get()
        while following is not None:
            first = following
            batch = [first]
            while (len(batch) + 1) * first.nbytes <= _BATCH_BYTES:
                try:
                    following = self._queue.get_nowait()
                except Empty:
                    break
                if following is None or following.nbytes != first.nbytes or following.space is not first.space:
                    break
                batch.append(following)
            is_ahead = following is not batch[-1]
            try:
                self._carry_out(batch)
            except Exception as error:  # if the threads ended, the queue would never be served
                self._store.fail_now(error)
            if not is_ahead:
                following = self._queue.get()


@dataclass(slots=True, eq=False)
class _Write(DiskTask):
    """A block to write. `number` is its place in the queue."""

    space: MemorySpace
    number: int
    block: MemoryBlock


@dataclass(slots=True, eq=False)
class _Order(DiskTask):
    """A prompt's blocks, queued up to the number `last`: once written, its first block is to be evicted last."""

    space: MemorySpace
    last: int
    hashes: Hashes


class DiskWriter(DiskThreads[_Write | _Order]):
    """Writes committed blocks. The store's condition guards the state that the threads share."""

    def __init__(
        self, store: RecoveringStore, arena: MappedArena, refusals: Refusals, admission: DiskAdmission
    ) -> None:
        super().__init__("kvtier-disk-writer", _NUM_WRITERS, store, arena)
        self._admission = admission
        self.num_written = 0
        self.last_number = 0
        self._unwritten: OrderedDict[int, None] = OrderedDict()
        self._awaited: list[int] = []
        self._refusals = refusals

    def queue(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None:
        """Queue blocks to be written in the background."""
        self._admission.spend(sum(block.size for block in blocks) * SLOT_ALIGN_BYTES)
        with self._condition:
            for block in blocks:
                block.is_queued = block.is_wanted = True
                self.last_number += 1
                self._unwritten[self.last_number] = None
                self._queue.put(_Write(space, block.size * SLOT_ALIGN_BYTES, self.last_number, block))

    def order(self, space: MemorySpace, hashes: Hashes) -> None:
        """Note that blocks queued in this order are one prompt, whose end is to be evicted before its beginning."""
        if len(hashes) > 1:
            with self._condition:
                self._queue.put(_Order(space, _BATCH_BYTES, self.last_number, hashes))  # a batch of its own

    @property
    def num_queued(self) -> int:
        with self._condition:
            return len(self._unwritten)

    def wait(self, last: int, timeout_s: float) -> None:
        """Wait until the blocks queued up to the number `last` are written.

        Raises `TierUnavailable` if the disk is down, and `TierTimeout`.
        """
        with self._condition:
            self._awaited.append(last)
            try:
                is_in_time = self._condition.wait_for(
                    lambda: self._is_written(last) or self._store.current is None, timeout_s
                )
            finally:
                self._awaited.remove(last)
            if not is_in_time:
                raise TierTimeout("the disk did not keep up within the deadline")
            if not self._is_written(last):
                raise TierUnavailable("the disk is down: blocks in memory were not written to it")

    def note_gone(self, block: Block) -> None:
        """Note that a block was evicted before it was written."""
        self._refusals.note(block, "the disk did not keep up, and they were evicted from memory")

    def _is_written(self, last: int) -> bool:
        return not self._unwritten or next(iter(self._unwritten)) > last

    def _carry_out(self, batch: Sequence[_Write | _Order]) -> None:
        if isinstance(batch[0], _Order):  # always the only task of its batch
            self._put_in_order(batch[0])
        else:
            self._write_when_up([task for task in batch if isinstance(task, _Write)])

    def _write_when_up(self, batch: Sequence[_Write]) -> None:
        """Write a batch; while the disk is down, wait until it is back."""
        with self._condition:
            while self._store.current is None and not self._store.is_closing:
                self._condition.wait()
            store = self._store.current
            self._store.num_using += 1
        num_new = 0
        try:
            if store is not None:
                num_new = self._write(store, batch[0].space, [task.block for task in batch])
        finally:
            self._admission.spend((num_new - len(batch)) * batch[0].nbytes)
            with self._condition:
                self._store.num_using -= 1
                for task in batch:
                    del self._unwritten[task.number]
                if self._awaited and self._is_written(min(self._awaited)):
                    self._condition.notify_all()

    def _write(self, store: DiskStore, space: MemorySpace, wanted: Sequence[MemoryBlock]) -> int:
        """Write blocks. Returns how many of them were new on disk."""
        blocks = self._owner.begin_storing(wanted)
        if len(blocks) < len(wanted):
            with self._condition:
                self._store.failures["gone before it was written"] += len(wanted) - len(blocks)
        stored = [False] * len(blocks)
        num_new = 0
        if not blocks:
            return num_new
        try:
            stored_space = self._store.space_of(store, space)
            if stored_space is None:
                self._refusals.note(blocks[0], "their namespace has a different block size on disk", len(blocks))
                return num_new
            slots, checksums, altered = self._summed(space, blocks)
            if altered:
                self._owner.drop_altered(altered)
                slots, checksums, whole = _without(altered, blocks, slots, checksums)
                self._owner.end_storing(altered, [False] * len(altered))
                blocks, stored = whole, [False] * len(whole)
                if not blocks:
                    return num_new
            outcomes = _written(store, stored_space, blocks, slots, checksums)
            stored = [outcome in (Written.NEW, Written.PRESENT) for outcome in outcomes]
            pinned = [block.hash for block in blocks if block.is_pinned]
            if pinned:  # pinned while they were being written
                store.pin(stored_space, pinned)
            num_new = self._note_outcomes(store, blocks, outcomes)
        except Exception as error:
            self._store.fail(store, error)
        finally:
            self._owner.end_storing(blocks, stored)
        return num_new

    def _summed(
        self, space: MemorySpace, blocks: Sequence[MemoryBlock]
    ) -> tuple[list[memoryview], list[int], list[MemoryBlock]]:
        """The blocks' slots and checksums, and the blocks whose bytes are not those of before."""
        slots = [self._arena.view(block.start * SLOT_ALIGN_BYTES, block.size * SLOT_ALIGN_BYTES) for block in blocks]
        checksums = [
            checksum_of(space.namespace, block.hash, slot[: space.block_bytes])
            for block, slot in zip(blocks, slots, strict=True)
        ]
        altered = []
        for block, found in zip(blocks, checksums, strict=True):
            if block.checksum is None or space.is_table(block):
                block.checksum = found
            elif block.checksum != found:
                altered.append(block)
        return slots, checksums, altered

    def _note_outcomes(self, store: DiskStore, blocks: Sequence[MemoryBlock], outcomes: Sequence[Written]) -> int:
        """Count outcomes, and refuse the blocks without room. Returns how many are new on disk."""
        refused = [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Written.NO_ROOM]
        num_new = outcomes.count(Written.NEW)
        with self._condition:
            self.num_written += num_new
            self._store.failures["no room"] += len(refused)
        if refused:
            self._refusals.note(refused[0], "all of it is in use or pinned", len(refused))
            self._store.log.warning("full", "disk store %s has no room: all of it is in use or pinned", store.folder)
            self._owner.refuse(refused)
        return num_new

    def _put_in_order(self, order: _Order) -> None:
        """Wait for the blocks queued before, which other writers may still be writing; then order them."""
        with contextlib.suppress(TierError):
            self.wait(order.last, _ORDER_S)
        with self._store.using() as store:
            stored_space = None if store is None else self._store.space_of(store, order.space)
            if store is not None and stored_space is not None:
                store.touch(stored_space, order.hashes)


def _written(
    store: DiskStore,
    space: StoreSpace,
    blocks: Sequence[MemoryBlock],
    slots: Sequence[memoryview],
    checksums: Sequence[int],
) -> list[Written]:
    """Write blocks, and try again for a while where room is short."""
    hashes = [block.hash for block in blocks]
    outcomes = store.write(space, hashes, slots, checksums)
    for _ in range(_ROOM_TRIES):
        if Written.NO_ROOM not in outcomes or not store.is_busy:
            break
        time.sleep(_ROOM_TRY_S)  # blocks that others are writing now can be evicted once they are whole
        again = store.write(space, hashes, slots, checksums)
        outcomes = [old if old is not Written.NO_ROOM else new for old, new in zip(outcomes, again, strict=True)]
    return outcomes


def _without(
    altered: Sequence[MemoryBlock],
    blocks: Sequence[MemoryBlock],
    slots: Sequence[memoryview],
    checksums: Sequence[int],
) -> tuple[list[memoryview], list[int], list[MemoryBlock]]:
    kept = [position for position, block in enumerate(blocks) if block not in altered]
    return [slots[at] for at in kept], [checksums[at] for at in kept], [blocks[at] for at in kept]


@dataclass(slots=True, eq=False)
class _Read(DiskTask):
    """A block to read from `store` into its reserved slot."""

    store: DiskStore
    stored: StoredBlock
    block: MemoryBlock


class DiskReader(DiskThreads[_Read]):
    """Reads blocks into slots of the arena that a match has reserved."""

    def __init__(self, store: RecoveringStore, arena: MappedArena) -> None:
        super().__init__("kvtier-disk-reader", _NUM_READERS, store, arena)
        self.num_read = 0

    def queue(self, store: DiskStore, stored: Sequence[StoredBlock], blocks: Sequence[Block]) -> None:
        with self._condition:
            self._store.num_using += len(blocks)
        for origin, block in zip(stored, blocks, strict=True):
            assert isinstance(block, MemoryBlock)
            assert block.hash == origin.hash
            self._queue.put(_Read(origin.space, block.size * SLOT_ALIGN_BYTES, store, origin, block))

    def _carry_out(self, batch: Sequence[_Read]) -> None:
        store = batch[0].store
        arrived = [False] * len(batch)
        stored = [read.stored for read in batch]
        spans = [(read.block.start * SLOT_ALIGN_BYTES, read.nbytes) for read in batch]
        try:
            for offset, nbytes in spans:  # page faults during the read would scatter the pages, and slow later reads
                self._arena.populate(offset, nbytes)
            failures = store.read(stored, [self._arena.view(offset, nbytes) for offset, nbytes in spans])
            arrived = [failure is None for failure in failures]
            for read, failure in zip(batch, failures, strict=True):
                if failure is None:
                    read.block.checksum = read.stored.checksum
                else:
                    self._store.log.warning("corrupt", "disk store %s: %s", self._store.folder, str(failure))
        except Exception as error:
            self._store.fail(store, error)
        finally:
            store.free(stored)
            with self._condition:
                self._store.num_using -= len(batch)
                self.num_read += sum(arrived)
            self._owner.end_loading([read.block for read in batch], arrived)
