"""The server's disk: writes committed blocks behind the clients' backs, brings them back, survives the disk's failures.

Writers take blocks from a queue; nobody waits for them but `flush`. Readers fill slots of the arena that a match has
reserved. A keeper thread saves recency, notices a folder that went away, and opens the store anew when it can; the
server goes on in memory meanwhile. The catalog decides what is stored and loaded; this does it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block
from kvtier.errors import ConfigError, TierError, TierRefused, TierTimeout, TierUnavailable
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.disk import DiskStore, StoredBlock, StoreSpace, Written
from kvtier.stores.files import Files
from kvtier.wire.messages import LISTED_DISK, LISTED_DOWN, LISTED_EVICTED

logger = logging.getLogger(__name__)

_NUM_WRITERS = min(16, 4 * (os.cpu_count() or 1))  # each also computes checksums
_NUM_READERS = min(64, 8 * (os.cpu_count() or 1))  # each also computes checksums, and reads nothing meanwhile
_BATCH_BYTES = 2 << 20  # what a thread moves in one go: fewer than all of a prompt, more than one block
_MAX_RECENT = 1024
_ORDER_S = 2.0
_ROOM_TRIES = 25
_ROOM_TRY_S = 0.02
_KEEPER_INTERVAL_S = 1.0
_LAST_RETRY_S = 30.0
_REGROWTH_S = 30.0


class MemoryBlock(Block):
    """A block in the arena. `is_stored`: the disk has it too. `checksum` is over key and payload, once computed."""

    __slots__ = ("checksum", "is_queued", "is_stored", "was_reused")

    def __init__(self, start: int, size: int) -> None:
        super().__init__(start, size)
        self.checksum: int | None = None
        self.is_stored = False
        self.is_queued = False
        self.was_reused = False


class BlockOwner(Protocol):
    """What the threads here ask of the catalog. Each takes its lock for a moment."""

    def begin_storing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        """Hold the blocks' room while they are written; returns those that have not gone from memory meanwhile."""
        ...

    def refuse(self, blocks: Sequence[MemoryBlock]) -> None:
        """The disk has no room for these."""
        ...

    def end_storing(self, blocks: Sequence[MemoryBlock], stored: Sequence[bool]) -> None: ...

    def end_loading(self, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None: ...

    def unstored(self) -> list[tuple[SpaceLike, MemoryBlock]]:
        """Everything in memory that should be on disk and is not."""
        ...


class SpaceLike(Protocol):
    """A namespace as the catalog knows it."""

    @property
    def namespace(self) -> Namespace: ...

    @property
    def name(self) -> str: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Load:
    """A block to bring from disk into its reserved slot."""

    block: MemoryBlock
    stored: StoredBlock
    store: DiskStore

    @property
    def nbytes(self) -> int:
        return self.block.size * SLOT_ALIGN_BYTES


class _Task:
    """Something for the writers to do. Those of one size and space may be done together, up to a batch's bytes."""

    def __init__(self, space: SpaceLike, nbytes: int) -> None:
        self.space = space
        self.nbytes = nbytes


class _Store(_Task):
    """A block to be written. `number` is its place in the queue."""

    def __init__(self, number: int, space: SpaceLike, block: MemoryBlock) -> None:
        super().__init__(space, block.size * SLOT_ALIGN_BYTES)
        self.number = number
        self.block = block


class _Order(_Task):
    """Blocks of one prompt, queued before this: once they are written, the first shall be the last to go."""

    def __init__(self, last: int, space: SpaceLike, hashes: Sequence[BlockHash]) -> None:
        super().__init__(space, _BATCH_BYTES)  # it goes alone
        self.last = last
        self.hashes = hashes


class Persistence:
    """One folder. Threads start with `start` and end with `close`."""

    def __init__(self, folder: Path, file_space: int, arena: MappedArena, *, fsync: bool, files: Files | None = None):
        """Opens the folder. Raises `ConfigError` when it cannot be used and `OSError` when the device fails."""
        self.folder = folder
        self.failures: Counter[str] = Counter()
        self.num_written = 0
        self.num_read = 0
        self._file_space = file_space
        self._files = files
        self._arena = arena
        self._fsync = fsync
        self._log = LogLimit(logger)
        self._condition = threading.Condition()
        # Queues hand each item to one thread; a condition would wake all of them for every block.
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._loads: SimpleQueue[Load | None] = SimpleQueue()
        self._unwritten: OrderedDict[int, None] = OrderedDict()
        self._last_number = 0
        self._awaited: list[int] = []
        self._recent: OrderedDict[BlockHash, tuple[SpaceLike, Sequence[BlockHash]]] = OrderedDict()
        self._is_closing = False
        self._threads: list[threading.Thread] = []
        self._owner: BlockOwner
        self._losses_before: Counter[str] = Counter()
        self._store: DiskStore | None = None
        self._failed_store: DiskStore | None = None
        self._num_using = 0
        self._drops: list[tuple[SpaceLike, Sequence[BlockHash] | None]] = []

    def open(self) -> None:
        """Open the folder, before `start`."""
        self._store = self._open_store()

    def _open_store(self) -> DiskStore:
        """Open the store and say what came back."""
        store = DiskStore(self.folder, self._file_space, files=self._files)
        spaces = [space for space in store.spaces() if len(space.index)]
        for space in spaces:
            logger.info("recover %d blocks. info: %s", len(space.index), store.info(space))
        if not spaces:
            logger.info("recover 0 blocks. info: {'folder': '%s'}", self.folder)
        if store.losses:
            logger.warning("disk store %s lost: %s", self.folder, dict(store.losses))
        return store

    def start(self, owner: BlockOwner) -> None:
        self._owner = owner
        for number in range(_NUM_WRITERS):
            self._spawn(f"kvtier-disk-writer-{number}", self._run_writer)
        for number in range(_NUM_READERS):
            self._spawn(f"kvtier-disk-reader-{number}", self._run_reader)
        self._spawn("kvtier-disk-keeper", self._run_keeper)

    # --- called by the catalog, under its lock: never blocks -------------------------------------------------------

    def match(self, space: SpaceLike, hashes: Sequence[BlockHash]) -> tuple[DiskStore, list[StoredBlock]] | None:
        """Reference the stored prefix of `hashes`."""
        store = self._store
        stored_space = None if store is None else self._space_of(store, space)
        if store is None or stored_space is None:
            return None
        stored = store.match(stored_space, hashes)
        return (store, stored) if stored else None

    def contains(self, space: SpaceLike, hashes: Sequence[BlockHash]) -> list[bool]:
        store = self._store
        stored_space = None if store is None else self._space_of(store, space)
        if store is None or stored_space is None:
            return [False] * len(hashes)
        return store.contains(stored_space, hashes)

    def presence(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[int]:
        """Of each hash whether it is here, was evicted from here, or cannot be known: LISTED_ flags."""
        store = self._store
        if store is None:
            return [LISTED_DOWN] * len(hashes)
        space = store.find(namespace)
        stored = [False] * len(hashes) if space is None else store.contains(space, hashes)
        return [
            LISTED_DISK if is_here else LISTED_EVICTED if was_here else 0
            for is_here, was_here in zip(stored, store.was_evicted(hashes), strict=True)
        ]

    def queue(self, space: SpaceLike, blocks: Sequence[MemoryBlock]) -> None:
        """Blocks to be written when a writer comes to it."""
        with self._condition:
            for block in blocks:
                block.is_queued = True
                self._last_number += 1
                self._unwritten[self._last_number] = None
                self._queue.put(_Store(self._last_number, space, block))

    def order(self, space: SpaceLike, hashes: Sequence[BlockHash]) -> None:
        """Blocks that were queued in this order are one prompt: it shall lose its end before its beginning."""
        if len(hashes) > 1:
            with self._condition:
                self._queue.put(_Order(self._last_number, space, hashes))

    def note_used(self, space: SpaceLike, hashes: Sequence[BlockHash]) -> None:
        """A prefix was used in memory: the disk's order of eviction hears of it soon, once for many times."""
        with self._condition:
            self._recent[hashes[-1]] = (space, hashes)
            self._recent.move_to_end(hashes[-1])
            if len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)

    def load(self, loads: Sequence[Load]) -> None:
        with self._condition:
            self._num_using += len(loads)
        for load in loads:
            self._loads.put(load)

    # --- called by connections -------------------------------------------------------------------------------------

    def drop(self, space: SpaceLike, hashes: Sequence[BlockHash] | None) -> int:
        with self._using() as store:
            stored_space = None if store is None else self._space_of(store, space)
            if store is None:
                self._drop_later(space, hashes)
            if store is None or stored_space is None:
                return 0
            try:
                return store.drop(stored_space, hashes)
            except OSError as error:
                self._drop_later(space, hashes)
                self._fail(store, error)
                return 0

    def _drop_later(self, space: SpaceLike, hashes: Sequence[BlockHash] | None) -> None:
        """When the disk is back, before anybody can see what is on it."""
        with self._condition:
            self._drops.append((space, hashes))

    def pin(self, space: SpaceLike, hashes: Sequence[BlockHash], *, keep: bool) -> int:
        store = self._store
        stored_space = None if store is None else self._space_of(store, space)
        if store is None or stored_space is None:
            return 0
        return store.pin(stored_space, hashes) if keep else store.unpin(stored_space, hashes)

    def blocks(self, space: SpaceLike) -> list[tuple[BlockHash, bool]]:
        store = self._store
        stored_space = None if store is None else self._space_of(store, space)
        return [] if store is None or stored_space is None else store.blocks(stored_space)

    def verify(self, space: SpaceLike, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of `hashes` are whole on disk, or not there at all."""
        with self._using() as store:
            stored_space = None if store is None else self._space_of(store, space)
            if store is None or stored_space is None:
                raise TierUnavailable("the disk is down or there is none")
            try:
                return [store.verify(stored_space, block_hash) for block_hash in hashes]
            except OSError as error:
                self._fail(store, error)
                raise TierUnavailable(f"the disk failed: {error.strerror or error}") from error

    def spaces(self) -> list[StoreSpace]:
        store = self._store
        return [] if store is None else [space for space in store.spaces() if len(space.index)]

    def flush(self, timeout_s: float) -> None:
        """Wait until what was queued before is written. Raises `TierUnavailable` when the disk is down."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            last = self._last_number
            self._awaited.append(last)
            try:
                while self._unwritten and next(iter(self._unwritten)) <= last:
                    if self._store is None:
                        raise TierUnavailable("the disk is down: what is in memory is not on it")
                    if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                        raise TierTimeout("the disk did not keep up within the deadline")
            finally:
                self._awaited.remove(last)
        with self._using() as store:
            if store is None:
                raise TierUnavailable("the disk is down: what is in memory is not on it")
            try:
                self._tell_used(store)
                store.flush(fsync=self._fsync)
            except OSError as error:
                self._fail(store, error)
                raise TierUnavailable(f"the disk failed: {error.strerror or error}") from error

    def levels(self) -> dict[str, float]:
        store = self._store
        with self._condition:
            queued = len(self._unwritten)
        levels = {} if store is None else store.levels()
        return {
            "disk_up": float(store is not None),
            "disk_queued_blocks": queued,
            "disk_written_blocks": self.num_written,
            "disk_read_blocks": self.num_read,
            **{f"disk_{name}": value for name, value in levels.items()},
        }

    def losses(self) -> dict[str, int]:
        """Blocks lost and failures, by kind."""
        store = self._store
        return dict(+(self._losses_before + self.failures + (store.losses if store is not None else Counter())))

    def close(self) -> None:
        """Write what is queued, as long as the disk works, and let go of the folder."""
        if self._store is not None:
            with contextlib.suppress(TierError):
                self.flush(timeout_s=60.0)
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        for _ in range(_NUM_WRITERS):
            self._queue.put(None)
        for _ in range(_NUM_READERS):
            self._loads.put(None)
        for thread in self._threads:
            thread.join()
        for store in (self._store, self._failed_store):
            if store is not None:
                store.close()

    # --- threads ---------------------------------------------------------------------------------------------------

    def _run_writer(self) -> None:
        for batch in _batches(self._queue, lambda first, other: first.space is other.space):
            stores = [task for task in batch if isinstance(task, _Store)]
            if stores:
                self._write_when_up(stores[0].space, stores)
            for task in batch:
                if isinstance(task, _Order):
                    self._put_in_order(task)

    def _write_when_up(self, space: SpaceLike, batch: Sequence[_Store]) -> None:
        """Holds on to the blocks while the disk is down."""
        with self._condition:
            while self._store is None and not self._is_closing:
                self._condition.wait()
            store = self._store
            self._num_using += 1
        try:
            if store is not None:
                self._write(store, space, [item.block for item in batch])
        finally:
            with self._condition:
                self._num_using -= 1
                for item in batch:
                    del self._unwritten[item.number]
                if self._awaited and (not self._unwritten or next(iter(self._unwritten)) > min(self._awaited)):
                    self._condition.notify_all()

    def _write(self, store: DiskStore, space: SpaceLike, wanted: Sequence[MemoryBlock]) -> None:
        blocks = self._owner.begin_storing(wanted)
        if len(blocks) < len(wanted):
            with self._condition:
                self.failures["gone before it was written"] += len(wanted) - len(blocks)
        stored = [False] * len(blocks)
        try:
            stored_space = self._space_of(store, space) if blocks else None
            if stored_space is None:
                return
            slots = [self._slot(block) for block in blocks]
            for block, slot in zip(blocks, slots, strict=True):
                if block.checksum is None:
                    block.checksum = checksum_of(space.namespace, block.hash, slot[: space.block_bytes])
            checksums = [block.checksum for block in blocks if block.checksum is not None]
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
            with self._condition:
                self.num_written += outcomes.count(Written.NEW)
                self.failures["no room"] += len(refused)
            if refused:
                self._log.warning("full", "disk store %s has no room: all of it is in use or pinned", self.folder)
                self._owner.refuse(refused)
        except OSError as error:
            self._fail(store, error)
        finally:
            self._owner.end_storing(blocks, stored)

    def _put_in_order(self, order: _Order) -> None:
        """Once those that are queued before are written: they are with other writers by now."""
        with self._condition:
            self._awaited.append(order.last)
            try:
                self._condition.wait_for(
                    lambda: not self._unwritten or next(iter(self._unwritten)) > order.last or self._store is None,
                    _ORDER_S,
                )
            finally:
                self._awaited.remove(order.last)
        with self._using() as store:
            stored_space = None if store is None else self._space_of(store, order.space)
            if store is not None and stored_space is not None:
                store.touch(stored_space, order.hashes)

    def _run_reader(self) -> None:
        for batch in _batches(self._loads, lambda first, other: first.stored.space is other.stored.space):
            self._read(batch[0].store, batch)

    def _read(self, store: DiskStore, batch: Sequence[Load]) -> None:
        arrived = [False] * len(batch)
        stored = [load.stored for load in batch]
        try:
            for load in batch:  # page by page, faults inside a read would leave them scattered, and later reads slow
                self._arena.populate(load.block.start * SLOT_ALIGN_BYTES, load.block.size * SLOT_ALIGN_BYTES)
            failures = store.read(stored, [self._slot(load.block) for load in batch])
            arrived = [failure is None for failure in failures]
            for load, failure in zip(batch, failures, strict=True):
                if failure is None:
                    load.block.checksum = load.stored.checksum
                else:
                    self._log.warning("corrupt", "disk store %s: %s", self.folder, str(failure))
            self.num_read += sum(arrived)
        except OSError as error:
            self._fail(store, error)
        finally:
            store.free(stored)
            with self._condition:
                self._num_using -= len(batch)
            self._owner.end_loading([load.block for load in batch], arrived)

    def _run_keeper(self) -> None:
        retry_s = _KEEPER_INTERVAL_S
        regrow_at = time.monotonic() + _REGROWTH_S
        wait_s = _KEEPER_INTERVAL_S
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._is_closing, wait_s):
                    return
            wait_s = _KEEPER_INTERVAL_S
            if self._store is None:
                if self._come_back():
                    retry_s = _KEEPER_INTERVAL_S
                else:
                    wait_s, retry_s = retry_s, min(2 * retry_s, _LAST_RETRY_S)
                continue
            with self._using() as store:
                if store is None:
                    continue
                try:
                    if not store.is_in_place():
                        raise OSError(None, "its folder or file was taken away")
                    self._tell_used(store)
                    store.save_recency()
                except OSError as error:
                    self._fail(store, error)
                if time.monotonic() > regrow_at:
                    regrow_at = time.monotonic() + _REGROWTH_S
                    store.try_growing_again()

    def _tell_used(self, store: DiskStore) -> None:
        with self._condition:
            recent, self._recent = self._recent, OrderedDict()
        for space, hashes in recent.values():
            stored_space = self._space_of(store, space)
            if stored_space is not None:
                store.touch(stored_space, hashes)

    # --- failing and coming back -----------------------------------------------------------------------------------

    def _fail(self, store: DiskStore, error: OSError) -> None:
        """The disk does not work: go on without it, and try again later."""
        with self._condition:
            self.failures["device"] += 1
            if self._store is not store:
                return
            self._store, self._failed_store = None, store
            self._losses_before += store.losses
            logger.warning(
                "disk store %s failed: %s; going on in memory, it is tried again", self.folder, error.strerror or error
            )
            self._condition.notify_all()

    def _come_back(self) -> bool:
        with self._condition:
            if self._num_using:
                return False  # a descriptor must not be closed under a thread that uses it
            failed, self._failed_store = self._failed_store, None
        if failed is not None:
            failed.close()
        try:
            store = self._open_store()
        except (ConfigError, OSError) as error:
            self._log.warning("down", "disk store is still down: %s", error)
            return False
        with self._condition:
            drops, self._drops = self._drops, []
        try:
            for space, hashes in drops:
                stored_space = self._space_of(store, space)
                if stored_space is not None:
                    store.drop(stored_space, hashes)
        except OSError as error:
            with self._condition:
                self._drops = drops + self._drops
            store.close()
            self._log.warning("down", "disk store is still down: %s", error)
            return False
        # Queued before anybody sees the disk up: a flush that does waits for it.
        for space, block in self._owner.unstored():
            self.queue(space, [block])
        with self._condition:
            self._store = store
            self._condition.notify_all()
        logger.info("disk store %s is up again", self.folder)
        return True

    # --- small -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self) -> Iterator[DiskStore | None]:
        """The store, kept open meanwhile; None when it is down."""
        with self._condition:
            store = self._store
            self._num_using += 1
        try:
            yield store
        finally:
            with self._condition:
                self._num_using -= 1

    def _space_of(self, store: DiskStore, space: SpaceLike) -> StoreSpace | None:
        """The namespace on disk; None when it has blocks of another size there."""
        try:
            return store.open(space.namespace, space.name, space.block_bytes, space.block_tokens)
        except TierRefused as error:
            self._log.warning("size", "disk store %s: %s; this namespace stays in memory", self.folder, error)
            return None

    def _slot(self, block: MemoryBlock) -> memoryview:
        return self._arena.view(block.start * SLOT_ALIGN_BYTES, block.size * SLOT_ALIGN_BYTES)

    def _spawn(self, name: str, target: object) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)


class _Job(Protocol):
    @property
    def nbytes(self) -> int: ...


_AnyJob = TypeVar("_AnyJob", bound=_Job)


def _batches(
    queue: SimpleQueue[_AnyJob | None], belongs: Callable[[_AnyJob, _AnyJob], bool]
) -> Iterator[list[_AnyJob]]:
    """Jobs that wait already and belong to the first, as many as may move in one go; ends with a None in the queue."""
    following = queue.get()
    while following is not None:
        first = following
        batch = [first]
        while (len(batch) + 1) * first.nbytes <= _BATCH_BYTES:
            try:
                following = queue.get_nowait()
            except Empty:
                break
            if following is None or following.nbytes != first.nbytes or not belongs(first, following):
                break
            batch.append(following)
        is_ahead = following is not batch[-1]
        yield batch
        if not is_ahead:
            following = queue.get()
