"""The threads between the arena and the store, and what they ask of the owner of the blocks.

Writers store committed blocks behind the clients' backs, and hold on to them while the disk is down. Readers fill slots
of the arena that a match has reserved.
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

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.pool import Block
from kvtier.cacheserver.disk_admission import DiskAdmission
from kvtier.cacheserver.namespaces import Hashes, MemoryBlock, MemorySpace
from kvtier.cacheserver.recovering_store import RecoveringStore
from kvtier.cacheserver.refusals import Refusals
from kvtier.errors import TierError, TierTimeout, TierUnavailable
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena
from kvtier.stores.disk import DiskStore, StoredBlock, Written

_NUM_WRITERS = min(16, 4 * (os.cpu_count() or 1))  # each also computes checksums
_NUM_READERS = min(64, 8 * (os.cpu_count() or 1))  # each also computes checksums, and reads nothing meanwhile
_BATCH_BYTES = 2 << 20  # what a thread moves in one go: fewer than all of a prompt, more than one block
_ORDER_S = 2.0
_ROOM_TRIES = 25
_ROOM_TRY_S = 0.02


class BlockOwner(Protocol):
    """Each method takes the catalog's lock for a moment."""

    def begin_storing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        """Hold the blocks' room while they are written; returns those that have not gone from memory meanwhile."""

    def drop_altered(self, blocks: Sequence[MemoryBlock]) -> int:
        """These have other bytes than when they were committed."""

    def refuse(self, blocks: Sequence[MemoryBlock]) -> None:
        """The disk has no room for these."""

    def end_storing(self, blocks: Sequence[MemoryBlock], stored: Sequence[bool]) -> None: ...

    def end_loading(self, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None: ...

    def store_what_leaves(self) -> None:
        """What memory is about to evict is written, if the disk was not given it and takes it now."""

    def unstored(self) -> list[tuple[MemorySpace, MemoryBlock]]:
        """After an outage: what is in memory and should be on disk. Nothing is on the disk for sure now."""


@dataclass(slots=True, eq=False)
class DiskTask:
    """Something to do. Tasks of one size and space may be done together, up to a batch's bytes."""

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
        """Do what is queued, and end the threads."""
        started = [thread for thread in self._threads if thread.ident is not None]
        for _ in started:
            self._queue.put(None)
        for thread in started:
            thread.join()

    def _carry_out(self, batch: Sequence[_AnyTask]) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        """Take tasks that wait already and belong to the first, as many as may move in one go."""
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
            except Exception as error:  # a thread that ended would leave its queue unserved
                self._store.fail_now(error)
            if not is_ahead:
                following = self._queue.get()


@dataclass(slots=True, eq=False)
class _Write(DiskTask):
    """A block to be written. `number` is its place in the queue."""

    space: MemorySpace
    number: int
    block: MemoryBlock


@dataclass(slots=True, eq=False)
class _Order(DiskTask):
    """Blocks of one prompt, queued up to `last`: once they are written, the first shall be the last to go."""

    space: MemorySpace
    last: int
    hashes: Hashes


class DiskWriter(DiskThreads[_Write | _Order]):
    """Writes committed blocks. What the threads share is guarded by the store's condition."""

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
        """Blocks to be written when a thread comes to it."""
        self._admission.spend(sum(block.size for block in blocks) * SLOT_ALIGN_BYTES)
        with self._condition:
            for block in blocks:
                block.is_queued = block.is_wanted = True
                self.last_number += 1
                self._unwritten[self.last_number] = None
                self._queue.put(_Write(space, block.size * SLOT_ALIGN_BYTES, self.last_number, block))

    def order(self, space: MemorySpace, hashes: Hashes) -> None:
        """Blocks that were queued in this order are one prompt: it shall lose its end before its beginning."""
        if len(hashes) > 1:
            with self._condition:
                self._queue.put(_Order(space, _BATCH_BYTES, self.last_number, hashes))  # it goes alone

    @property
    def num_queued(self) -> int:
        with self._condition:
            return len(self._unwritten)

    def wait(self, last: int, timeout_s: float) -> None:
        """Wait until what was queued up to the number `last` is written.

        Raises `TierUnavailable` when the disk is down, and `TierTimeout`.
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
                raise TierUnavailable("the disk is down: what is in memory is not on it")

    def note_gone(self, block: Block) -> None:
        """A block was evicted before a thread came to it."""
        self._refusals.note(block, "the disk did not keep up, and they had to leave memory")

    def _is_written(self, last: int) -> bool:
        return not self._unwritten or next(iter(self._unwritten)) > last

    def _carry_out(self, batch: Sequence[_Write | _Order]) -> None:
        if isinstance(batch[0], _Order):  # alone
            self._put_in_order(batch[0])
        else:
            self._write_when_up([task for task in batch if isinstance(task, _Write)])

    def _write_when_up(self, batch: Sequence[_Write]) -> None:
        """Holds on to the blocks while the disk is down."""
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
        """Returns how many blocks were written that were not there."""
        failures = self._store.failures
        blocks = self._owner.begin_storing(wanted)
        if len(blocks) < len(wanted):
            with self._condition:
                failures["gone before it was written"] += len(wanted) - len(blocks)
        stored = [False] * len(blocks)
        num_new = 0
        if not blocks:
            return num_new
        try:
            stored_space = self._store.space_of(store, space)
            if stored_space is None:
                self._refusals.note(blocks[0], "their namespace has blocks of another size there", len(blocks))
                return num_new
            slots = [
                self._arena.view(block.start * SLOT_ALIGN_BYTES, block.size * SLOT_ALIGN_BYTES) for block in blocks
            ]
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
            if altered:
                self._owner.drop_altered(altered)
                slots, checksums, whole = _without(altered, blocks, slots, checksums)
                self._owner.end_storing(altered, [False] * len(altered))
                blocks, stored = whole, [False] * len(whole)
                if not blocks:
                    return num_new
            hashes = [block.hash for block in blocks]
            outcomes = store.write(stored_space, hashes, slots, checksums)
            for _ in range(_ROOM_TRIES):
                if Written.NO_ROOM not in outcomes or not store.is_busy:
                    break
                time.sleep(_ROOM_TRY_S)  # room that others are writing into can be taken from them once they are done
                again = store.write(stored_space, hashes, slots, checksums)
                outcomes = [
                    old if old is not Written.NO_ROOM else new for old, new in zip(outcomes, again, strict=True)
                ]
            stored = [outcome in (Written.NEW, Written.PRESENT) for outcome in outcomes]
            pinned = [block.hash for block in blocks if block.is_pinned]
            if pinned:  # while they were on their way
                store.pin(stored_space, pinned)
            refused = [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Written.NO_ROOM]
            num_new = outcomes.count(Written.NEW)
            with self._condition:
                self.num_written += num_new
                failures["no room"] += len(refused)
            if refused:
                self._refusals.note(refused[0], "all of it is in use or pinned", len(refused))
                self._store.log.warning(
                    "full", "disk store %s has no room: all of it is in use or pinned", store.folder
                )
                self._owner.refuse(refused)
        except Exception as error:
            self._store.fail(store, error)
        finally:
            self._owner.end_storing(blocks, stored)
        return num_new

    def _put_in_order(self, order: _Order) -> None:
        """Once those that are queued before are written: they are with other writers by now."""
        with contextlib.suppress(TierError):
            self.wait(order.last, _ORDER_S)
        with self._store.using() as store:
            stored_space = None if store is None else self._store.space_of(store, order.space)
            if store is not None and stored_space is not None:
                store.touch(stored_space, order.hashes)


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
    """A block to bring from `store` into its reserved slot."""

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
            for offset, nbytes in spans:  # page by page, faults inside a read would scatter them, and slow later reads
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
