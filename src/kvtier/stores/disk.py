"""Blocks on disk: crash-safe, checksummed, never more than a budget. Thread-safe.

Payloads lie in one file, a space like an arena: blocks of several models share it, and the coldest are evicted first.
Records lie in another. To write a block, the records of those it replaces are wiped, then its payload is written
(direct I/O), then its record. So whenever the process dies, a record either names whole bytes or does not exist. The
checksum over key and payload is verified on every read, so that wrong bytes are never returned, whatever happens to the
files. The index in memory is rebuilt from the records (`opening`). `_lock` guards index and accounts and is never held
over I/O; `store_room` has the locks of the files' growth and of wipes; `block_bytes` moves the payloads.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.block import Block, Presence
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.fair_policy import FairPolicy
from kvtier.blocks.ghosts import Ghosts, scope_of
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.pool import BlockPool
from kvtier.blocks.retention import Retention
from kvtier.blocks.share import Share
from kvtier.errors import BlockCorrupt, ConfigError, TierRefused
from kvtier.memory.checksum import checksum_of
from kvtier.sizes import format_size
from kvtier.stores.block_bytes import MAX_SEALED_BYTES, BlockBytes
from kvtier.stores.files import Files
from kvtier.stores.folder import MIN_FILE_BYTES, is_lock_of, room_in, set_aside_old, take_folder
from kvtier.stores.opening import Opening, without_collector
from kvtier.stores.payload_file import PAYLOADS_NAME, PayloadFile
from kvtier.stores.record_file import RECORDS_NAME, RecordFile, step_bytes_of
from kvtier.stores.records import UNIT_BYTES
from kvtier.stores.store_room import StoreRoom
from kvtier.stores.stored_block import StoredBlock, StoreSpace

logger = logging.getLogger(__name__)

_RECENCY_BATCH = 512
_NEARLY_FULL = 8
"""The store is nearly full if less than one in this many units is free."""


class Written(enum.Enum):
    """The outcome of writing a block."""

    NEW = enum.auto()
    PRESENT = enum.auto()  # it was stored already, or another thread is writing it
    NO_ROOM = enum.auto()
    DROPPED = enum.auto()  # it was dropped meanwhile


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of opening: recovered blocks, and losses by kind."""

    num_blocks: int
    losses: dict[str, int]


class DiskStore:
    """Owns `folder` (one process at a time) and two files in it. Blocks are ciphertext if `files` has a cipher."""

    def __init__(
        self,
        folder: Path,
        file_space: int,
        *,
        files: Files | None = None,
        share_of: Callable[[str], Share] | None = None,
        eviction: Eviction = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `share_of`, the name of a namespace determines the share of the room that its blocks count towards.

        Raises `ConfigError` if the folder cannot be used: not writable, in use, of an unknown format, too small.

        Raises `OSError` if the device fails.
        """
        if file_space < MIN_FILE_BYTES:
            raise ConfigError(f"file space must be at least {format_size(MIN_FILE_BYTES)}")
        self.folder = folder
        self.file_space = file_space
        self.losses: Counter[str] = Counter()
        self._files = Files() if files is None else files
        self._lock = threading.Lock()
        self._ghosts = Ghosts()
        self._share_of: Callable[[str], Share | None] = (lambda name: None) if share_of is None else share_of
        make_policy = functools.partial(eviction_policy, eviction, declines=False, clock=clock)
        policy: EvictionPolicy[Block] = make_policy() if share_of is None else FairPolicy(make_policy)
        self._pool = BlockPool(0, policy, make=StoredBlock, on_evict=self._note_evicted)
        self._spaces: dict[Namespace, StoreSpace] = {}
        self._touched: dict[StoredBlock, None] = {}
        self._next_sequence = 1
        self._next_use = 1
        self._is_folder_synced = False
        with contextlib.ExitStack() as undo:
            self._lock_fd = take_folder(folder)
            undo.callback(os.close, self._lock_fd)
            set_aside_old(folder, file_space, self._files)
            self._limit_bytes = room_in(folder, file_space)
            try:
                self._payloads = PayloadFile(folder / PAYLOADS_NAME, self._files)
                undo.callback(self._payloads.close)
                self._records = RecordFile(folder / RECORDS_NAME, self._files)
                undo.callback(self._records.close)
            except OSError as error:
                raise ConfigError(f"the KV cache folder {folder} cannot be used: {error.strerror}") from error
            self._bytes = BlockBytes(self._payloads, self._files.cipher, self._lose)
            self.recovery = self._recover()
            undo.pop_all()

    # --- what is there ---------------------------------------------------------------------------------------------

    def open(self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int) -> StoreSpace:
        """The space of a namespace. Raises `TierRefused` for another block size than its own, or too large a one."""
        if self._files.cipher is not None and block_bytes > MAX_SEALED_BYTES:
            raise TierRefused(f"a block of {format_size(block_bytes)} is too large to encrypt")
        with self._lock:
            space = self._spaces.get(namespace)
            if space is None or (space.block_bytes != block_bytes and not len(space.index)):
                share = self._share_of(name)
                space = self._spaces[namespace] = StoreSpace(namespace, name, block_bytes, block_tokens, share)
        if space.block_bytes != block_bytes:
            raise TierRefused(
                f"namespace {namespace.hex()[:12]} has blocks of {space.block_bytes} bytes on disk, not {block_bytes}"
            )
        return space

    def find(self, namespace: Namespace) -> StoreSpace | None:
        """The space of a namespace that exists already; None otherwise."""
        with self._lock:
            return self._spaces.get(namespace)

    def was_evicted(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of these were evicted since the store was opened, as far as it remembers."""
        scope = scope_of(namespace)
        with self._lock:
            return [self._ghosts.has(block_hash, scope) for block_hash in hashes]

    def contains(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._lock:
            return [space.index.presence(block_hash) is Presence.READY for block_hash in hashes]

    def pins(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Whether each is pinned; None if it is not stored."""
        with self._lock:
            found = (space.index.blocks.get(block_hash) for block_hash in hashes)
            return [block.is_pinned if block is not None and block.is_ready else None for block in found]

    def match(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> list[StoredBlock]:
        """Reference the longest stored prefix of `hashes`; `free` each block after reading it."""
        with self._lock:
            return self._pool.match(space.index, hashes).blocks  # type: ignore[return-value]

    def free(self, blocks: Sequence[StoredBlock]) -> None:
        """Return references; the blocks count as used now."""
        with self._lock:
            for block in reversed(blocks):
                self._use(block)
            self._pool.free(blocks)

    def touch(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> None:
        """Mark stored blocks among `hashes` as used now; the first is evicted last."""
        with self._lock:
            found = [space.index.blocks.get(block_hash) for block_hash in hashes]
            blocks = [block for block in found if isinstance(block, StoredBlock) and block.is_ready]
            for block in reversed(blocks):
                self._use(block)
            self._pool.touch(blocks)

    # --- bytes -----------------------------------------------------------------------------------------------------

    def write(
        self,
        space: StoreSpace,
        hashes: Sequence[BlockHash],
        payloads: Sequence[memoryview],
        checksums: Sequence[int] | None = None,
    ) -> list[Written]:
        """Store blocks. On return, those that are NEW survive the end of the process.

        A payload has `block_bytes`, or `slot_bytes` of page-aligned memory, which is then written without a copy.
        Raises `OSError` if the device fails; nothing is stored then.
        """
        if checksums is None:
            checksums = [
                checksum_of(space.namespace, block_hash, payload[: space.block_bytes])
                for block_hash, payload in zip(hashes, payloads, strict=True)
            ]
        outcomes: list[Written] = []
        while len(outcomes) < len(hashes):  # more than once only if records or room are short
            first = len(outcomes)
            numbers = self._room.take_records(space.index.block_units, len(hashes) - first, space.index.share)
            part = slice(first, first + max(1, len(numbers)))
            outcomes += self._write_part(space, hashes[part], payloads[part], checksums[part], numbers)
        return outcomes

    def read(self, blocks: Sequence[StoredBlock], into: Sequence[memoryview]) -> list[BlockCorrupt | None]:
        """Fill `into`, verified: None for each intact block, or the reason why it is not; a corrupt block is dropped.

        The blocks are of one namespace, and the caller holds a reference on each; `into` is as for `write`.
        """
        return self._bytes.read(blocks, into) if blocks else []

    def flush(self, *, fsync: bool) -> None:
        """Everything written before survives the end of the process and, with `fsync`, a power cut."""
        self.save_recency()
        if fsync:
            self._payloads.sync()
            self._records.sync()
            self._sync_folder()

    def save_recency(self) -> None:
        """Record which blocks were used since the last call."""
        while True:
            batch: list[StoredBlock] = []
            with self._room.wipe_lock:  # a record being wiped must not be written again afterwards
                with self._lock:
                    while self._touched and len(batch) < _RECENCY_BATCH:
                        block = next(iter(self._touched))
                        del self._touched[block]
                        if block.is_ready:
                            self._pool.hold(block)
                            batch.append(block)
                    records = [(block.record, self._bytes.record_of(block)) for block in batch]
                if not batch:
                    return
                try:
                    self._records.write(records)
                finally:
                    with self._lock:
                        for block in batch:
                            self._pool.let_go(block)

    # --- forgetting ------------------------------------------------------------------------------------------------

    def drop(self, space: StoreSpace, hashes: Sequence[BlockHash] | None = None) -> int:
        """Forget blocks, all of the namespace by default."""
        with self._lock:
            wanted = list(space.index.blocks) if hashes is None else list(dict.fromkeys(hashes))
            gone = [block for block_hash in wanted if (block := space.index.blocks.get(block_hash)) is not None]
            ready = [block for block in gone if isinstance(block, StoredBlock) and block.is_ready]
            # Referenced until their records are wiped: their room must not be reused before.
            self._pool.reference(ready)
            # Including those being written: the writer then wipes the record.
            num_dropped = self._pool.drop(space.index, [block.hash for block in gone])
            for block_hash in wanted:
                self._ghosts.discard(block_hash, space.index.scope)
        try:
            self._room.wipe(ready)
        finally:
            with self._lock:
                self._pool.free(ready)
        return num_dropped

    def pin(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> int:
        """Keep the stored blocks of `hashes` from eviction until `unpin` or `drop`, at most half of the budget.

        Saved with recency, so it survives restarts.
        """
        with self._lock:
            num_pinned = self._pool.pin(space.index, hashes, self._limit_bytes // UNIT_BYTES // 2)
            self._touch_all(space, hashes)
            return num_pinned

    def unpin(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            num_unpinned = self._pool.unpin(space.index, hashes)
            self._touch_all(space, hashes)
            return num_unpinned

    def retain(self, space: StoreSpace, hashes: Sequence[BlockHash], retention: Retention) -> int:
        """Keep these from eviction for a time, stored or not, as far as the owner's share allows.

        Not saved: after a restart, they are ordinary blocks.
        """
        with self._lock:
            limit = space.index.share.max_retained
            max_units = self._limit_bytes // UNIT_BYTES // 4 if limit is None else limit
            return self._pool.retain(space.index, hashes, retention, max_units)

    def end_retention(self, space: StoreSpace, hashes: Sequence[BlockHash], account: str) -> int:
        with self._lock:
            return self._pool.end_retention(space.index, hashes, account)

    def retained_bytes(self) -> int:
        with self._lock:
            return self._pool.retained_units() * UNIT_BYTES

    def blocks(self, space: StoreSpace) -> list[tuple[BlockHash, bool]]:
        """The hashes of stored blocks, and whether each is pinned."""
        with self._lock:
            return [(block.hash, block.is_pinned) for block in space.index.blocks.values() if block.is_ready]

    def verify(self, space: StoreSpace, block_hash: BlockHash) -> bool:
        """Read a block and compare its checksum; False if it is wrong, and then dropped. Does not count as a use.

        Also True for a block that is not stored, or not yet.
        """
        with self._lock:
            block = space.index.blocks.get(block_hash)
            if not isinstance(block, StoredBlock) or not block.is_ready:
                return True
            self._pool.hold(block)
        try:
            into = memoryview(bytearray(space.block_bytes))
            return self.read([block], [into]) == [None]
        except MemoryError:  # no machine can have written a block this large
            self._lose(block, "unreadable")
            return False
        finally:
            with self._lock:
                self._pool.let_go(block)

    def hold_leaving(self, count: int) -> list[StoredBlock]:
        """The blocks that would be evicted next, if little room is left. They stay, unused, until `let_go`."""
        with self._lock:
            if self._room.can_grow or self._pool.free_units * _NEARLY_FULL > self._pool.num_units:
                return []
            leaving = [block for block in self._pool.coldest(count) if isinstance(block, StoredBlock)]
            for block in leaving:
                self._pool.hold(block)
            return leaving

    def let_go(self, blocks: Sequence[StoredBlock]) -> None:
        """Blocks of `hold_leaving` may be evicted again."""
        with self._lock:
            for block in blocks:
                self._pool.let_go(block)

    # --- looking ---------------------------------------------------------------------------------------------------

    def spaces(self) -> list[StoreSpace]:
        with self._lock:
            return list(self._spaces.values())

    def levels(self) -> dict[str, float]:
        with self._lock:
            return {
                "file_bytes": self._pool.num_units * UNIT_BYTES + self._records.nbytes,
                "file_space_bytes": self.file_space,
                "used_bytes": (self._pool.num_units - self._pool.free_units) * UNIT_BYTES,
                "pinned_bytes": self._pool.pinned_units * UNIT_BYTES,
                "blocks": sum(len(space.index) for space in self._spaces.values()),
                "evicted_blocks": self._pool.num_evicted,
            }

    def info(self, space: StoreSpace | None) -> dict[str, int]:
        """Figures of a namespace for the log line of a recovery.

        Without a namespace, the block size is unknown: `block_size` is 0, and counts are of blocks of 4 KiB, the
        smallest.
        """
        with self._lock:
            block_units = 1 if space is None else space.index.block_units
            num_blocks = self._room.max_data_units // block_units
            num_full = 0 if space is None else len(space.index)
        return {
            "block_size": 0 if space is None else space.block_tokens,
            "num_blocks": num_blocks,
            "num_full_blocks": num_full,
            "num_free_blocks": num_blocks - num_full,
        }

    def is_in_place(self) -> bool:
        """Whether the open files, and the lock, are still those in the folder."""
        return self._payloads.is_in_place() and self._records.is_in_place() and is_lock_of(self._lock_fd, self.folder)

    @property
    def is_busy(self) -> bool:
        """Blocks are being read or written: more room may soon be free."""
        return self._pool.referenced_units > 0

    def try_growing_again(self) -> None:
        """A disk that was full may have room again."""
        self._room.try_growing_again()

    def close(self) -> None:
        """Save recency and release the folder."""
        try:
            self.save_recency()
        except OSError as error:
            logger.warning("disk store %s: recency was not saved: %s", self.folder, error)
        finally:
            self._payloads.close()
            self._records.close()
            os.close(self._lock_fd)

    # --- private: opening ------------------------------------------------------------------------------------------

    # --- private: room ---------------------------------------------------------------------------------------------

    # --- private ---------------------------------------------------------------------------------------------------

    def _recover(self) -> Recovery:
        step_bytes = step_bytes_of(self._limit_bytes)
        opening = Opening(self.folder, self._payloads, self._records, self._bytes, self._files.cipher, self._share_of)
        opened = opening.run(self._limit_bytes, step_bytes)
        self._spaces = opened.spaces
        self._next_sequence, self._next_use = opened.next_sequence, opened.next_use
        self.losses += opened.losses
        self._room = StoreRoom(
            self.folder,
            self._pool,
            self._lock,
            self._payloads,
            self._records,
            self.file_space,
            self._limit_bytes,
            step_bytes,
            opened.free_records,
        )
        with without_collector():
            cold_to_warm = sorted(opened.blocks, key=lambda block: block.used_at)
            self._pool.restore(opened.num_units, opened.blocks, cold_to_warm)
        return Recovery(len(opened.blocks), dict(self.losses))

    def _sync_folder(self) -> None:
        """Sync the files' names too, once."""
        if not self._is_folder_synced:
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._is_folder_synced = True

    def _write_part(
        self,
        space: StoreSpace,
        hashes: Sequence[BlockHash],
        payloads: Sequence[memoryview],
        checksums: Sequence[int],
        numbers: list[int],
    ) -> list[Written]:
        """Write blocks that have records; unused `numbers` go back.

        Writes none, and returns nothing, if others took the room meanwhile and the file can grow: then nothing must be
        evicted.
        """
        outcomes = [Written.PRESENT] * len(hashes)
        blocks: list[StoredBlock] = []
        unwritten: list[StoredBlock] = []  # their records are free afterwards; dropping a READY block frees its own
        try:
            with self._lock:
                if numbers and self._room.should_grow(len(numbers) * space.index.block_units):
                    return []
                grant = self._pool.reserve(space.index, hashes, len(numbers))
                for block, position in zip(grant.blocks, grant.positions, strict=True):
                    assert isinstance(block, StoredBlock)
                    block.space = space
                    block.record = numbers.pop()
                    block.checksum = checksums[position]
                    block.seal = b""
                    block.sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
                    block.used_at, self._next_use = self._next_use, self._next_use + 1
                    blocks.append(block)
                    unwritten.append(block)
                    outcomes[position] = Written.NEW
                if grant.num_refused:
                    for position, block_hash in enumerate(hashes):
                        if block_hash not in space.index.blocks:
                            outcomes[position] = Written.NO_ROOM
                must_wipe = self._room.must_wipe
            if must_wipe:
                self._room.wipe_evicted()
            if blocks:
                self._bytes.write(space, blocks, [payloads[position] for position in grant.positions])
                self._records.write((block.record, self._bytes.record_of(block)) for block in blocks)
                with self._lock:
                    self._pool.commit(blocks)
                    unwritten = [block for block in blocks if not block.is_ready]
                    if not unwritten:
                        self._pool.free(blocks)
                        blocks = []
                self._records.wipe(block.record for block in unwritten)
                for block in unwritten:
                    outcomes[grant.positions[blocks.index(block)]] = Written.DROPPED
        finally:
            if numbers or blocks:
                with self._lock:
                    self._room.give_records(numbers)
                    self._room.give_records(block.record for block in unwritten)
                    self._pool.free(blocks)
        return outcomes

    def _use(self, block: StoredBlock) -> None:
        block.used_at, self._next_use = self._next_use, self._next_use + 1
        self._touched[block] = None

    def _touch_all(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            block = space.index.blocks.get(block_hash)
            if isinstance(block, StoredBlock) and block.is_ready:
                self._touched[block] = None

    def _note_evicted(self, block: Block) -> None:
        assert isinstance(block, StoredBlock)
        self._touched.pop(block, None)
        self._room.wipe_later((block,))
        self._ghosts.add(block.hash, block.index.scope)

    def _lose(self, block: StoredBlock, kind: str) -> None:
        with self._lock:
            self.losses[kind] += 1
        self.drop(block.space, [block.hash])
