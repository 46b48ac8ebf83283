"""Blocks on disk: crash-safe, checksummed, never more than a budget. Thread-safe.

Payloads lie in one file, a space like an arena: blocks of several models share it, and the coldest are evicted first.
Records lie in another. To write a block, the records of those it replaces are wiped, then its payload is written
(direct I/O), then its record. So whenever the process dies, a record either names whole bytes or does not exist. The
checksum over key and payload is verified on every read, so that wrong bytes are never returned, whatever happens to the
files. The index in memory is rebuilt from the records. `_lock` guards index and accounts and is never held over I/O;
`_meta_lock` orders the files' growth; `_wipe_lock` keeps wipes and updates of one record apart.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import gc
import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.fair_policy import FairPolicy
from kvtier.blocks.ghosts import Ghosts, scope_of
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.pool import Block, BlockPool, PrefixIndex, Presence
from kvtier.blocks.retention import Retention
from kvtier.blocks.share import Share
from kvtier.errors import BlockCorrupt, ConfigError, TierRefused
from kvtier.memory.checksum import checksum_of
from kvtier.sizes import format_size
from kvtier.stores.files import BlockCipher, Files, NotAuthentic
from kvtier.stores.folder import MIN_FILE_BYTES, is_lock_of, room_in, set_aside_old, take_folder
from kvtier.stores.payload_file import PAYLOADS_NAME, PayloadFile
from kvtier.stores.record_file import RECORDS_NAME, RecordFile, step_bytes_of
from kvtier.stores.records import UNIT_BYTES, BlockRecord
from kvtier.stores.recovery import ShrinkPlan, any_sealed, choose, counted_anew, fit, last_counts, units_of

logger = logging.getLogger(__name__)

_MIN_GROWTH_BYTES = 1 << 20
_MAX_GROWTH_BYTES = 256 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RECENCY_BATCH = 512
_SPARE_RECORDS = 1024
_MAX_SEALED_BYTES = 1 << 30
_MAX_TRIED = 8
_FAR_COUNT = 1 << 48  # no server writes this many blocks; a damaged record must not exhaust the counter


_NEARLY_FULL = 8
"""The store is nearly full if less than one in this many units is free."""


class Written(enum.Enum):
    """The outcome of writing a block."""

    NEW = enum.auto()
    PRESENT = enum.auto()  # it was stored already, or another thread is writing it
    NO_ROOM = enum.auto()
    DROPPED = enum.auto()  # it was dropped meanwhile


class StoredBlock(Block):
    """A block's place in the file, and the contents of its record."""

    __slots__ = ("checksum", "record", "seal", "sequence", "space", "used_at")

    space: StoreSpace
    record: int
    checksum: int
    sequence: int
    used_at: int
    seal: bytes


class StoreSpace:
    """One namespace's blocks in a store."""

    def __init__(
        self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int, share: Share | None
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.slot_bytes = slot_bytes_of(block_bytes)
        self.index = PrefixIndex(self.slot_bytes // UNIT_BYTES, share, scope_of(namespace))

    def about(self, block_hash: BlockHash) -> bytes:
        """The associated data that binds a ciphertext to its block."""
        return b"".join((self.namespace, block_hash, self.block_bytes.to_bytes(8, "little")))


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
        self._meta_lock = threading.Lock()
        self._wipe_lock = threading.Lock()
        self._ghosts = Ghosts()
        self._share_of = (lambda name: None) if share_of is None else share_of
        make_policy = functools.partial(eviction_policy, eviction, declines=False, clock=clock)
        policy: EvictionPolicy[Block] = make_policy() if share_of is None else FairPolicy(make_policy)
        self._pool = BlockPool(0, policy, make=StoredBlock, on_evict=self._note_evicted)
        self._spaces: dict[Namespace, StoreSpace] = {}
        self._free_records: deque[int] = deque()
        self._to_wipe: list[StoredBlock] = []
        self._num_wiping = 0
        self._touched: dict[StoredBlock, None] = {}
        self._next_sequence = 1
        self._next_use = 1
        self._is_full = False
        self._is_folder_synced = False
        with contextlib.ExitStack() as undo:
            self._lock_fd = take_folder(folder)
            undo.callback(os.close, self._lock_fd)
            set_aside_old(folder, file_space, self._files)
            self._limit_bytes = room_in(folder, file_space)
            self._step_bytes = step_bytes_of(self._limit_bytes)
            try:
                self._payloads = PayloadFile(folder / PAYLOADS_NAME, self._files)
                undo.callback(self._payloads.close)
                self._records = RecordFile(folder / RECORDS_NAME, self._files)
                undo.callback(self._records.close)
            except OSError as error:
                raise ConfigError(f"the KV cache folder {folder} cannot be used: {error.strerror}") from error
            self.recovery = self._recover()
            undo.pop_all()

    # --- what is there ---------------------------------------------------------------------------------------------

    def open(self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int) -> StoreSpace:
        """The space of a namespace. Raises `TierRefused` for another block size than its own, or too large a one."""
        if self._files.cipher is not None and block_bytes > _MAX_SEALED_BYTES:
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
            numbers = self._take_records(space.index.block_units, len(hashes) - first, space.index.share)
            part = slice(first, first + max(1, len(numbers)))
            outcomes += self._write_part(space, hashes[part], payloads[part], checksums[part], numbers)
        return outcomes

    def read(self, blocks: Sequence[StoredBlock], into: Sequence[memoryview]) -> list[BlockCorrupt | None]:
        """Fill `into`, verified: None for each intact block, or the reason why it is not; a corrupt block is dropped.

        The blocks are of one namespace, and the caller holds a reference on each; `into` is as for `write`.
        """
        if not blocks:
            return []
        space = blocks[0].space
        try:
            if self._files.cipher is not None:
                return [self._opened(block, view, self._files.cipher) for block, view in zip(blocks, into, strict=True)]
            self._payloads.read([block.start for block in blocks], into, space.block_bytes, space.slot_bytes)
        except OSError as error:
            if len(blocks) > 1:  # find out which one failed
                return [self.read([block], [view])[0] for block, view in zip(blocks, into, strict=True)]
            self._lose(blocks[0], "unreadable")
            return [BlockCorrupt(f"a block on disk cannot be read: {error.strerror or error}")]
        return [self._verified(block, view) for block, view in zip(blocks, into, strict=True)]

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
            with self._wipe_lock:  # a record being wiped must not be written again afterwards
                with self._lock:
                    while self._touched and len(batch) < _RECENCY_BATCH:
                        block = next(iter(self._touched))
                        del self._touched[block]
                        if block.is_ready:
                            self._pool.hold(block)
                            batch.append(block)
                    records = [(block.record, self._record_of(block)) for block in batch]
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
            with self._wipe_lock:
                self._wipe(ready)
        except BaseException:
            with self._lock:
                self._to_wipe += ready  # before their room or their records are reused
            raise
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
            can_grow = not self._is_full and self._growable_units() > 0
            if can_grow or self._pool.free_units * _NEARLY_FULL > self._pool.num_units:
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
            num_blocks = (self._limit_bytes - self._records.nbytes) // UNIT_BYTES // block_units
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
        self._is_full = False

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

    def _recover(self) -> Recovery:
        data_units = self._payloads.nbytes // UNIT_BYTES
        with _without_collector():
            found, damaged = self._records.read()
            kept, losses = choose(self._of_our_kind(found), data_units)
        self.losses += losses
        if damaged:
            self.losses["damaged record"] += len(damaged)
        if self._records.nbytes and not self._records.has_header:
            self.losses["header"] += 1
        if self._records.num_missing or (data_units and not self._records.num_records):
            self.losses["truncated records"] += max(1, self._records.num_missing)
        self._records.repair()
        self._records.wipe([*damaged, *(found.keys() - kept.keys())])
        self._records.cut_free(max(kept, default=-1) + 1, data_units + data_units // 8 + _SPARE_RECORDS)
        last, last_use = last_counts(found)
        if max(last, last_use) > _FAR_COUNT:
            kept = counted_anew(kept)
            self._records.write(kept.items())
            last, last_use = last_counts(kept)
        self._next_sequence, self._next_use = last + 1, last_use + 1
        if data_units * UNIT_BYTES + self._records.nbytes > self._limit_bytes:
            plan = fit(kept, self._limit_bytes, self._step_bytes)
            kept = self._shrink(plan)
            data_units = min(data_units, plan.data_units)
        if self._payloads.nbytes > data_units * UNIT_BYTES:
            self._payloads.cut(data_units * UNIT_BYTES)
        with _without_collector():
            blocks = self._adopt(kept)
            cold_to_warm = sorted(blocks, key=lambda block: block.used_at)
            self._pool.restore(data_units, blocks, cold_to_warm)
        self._free_records.extend(number for number in range(self._records.num_records) if number not in kept)
        return Recovery(len(blocks), dict(self.losses))

    def _of_our_kind(self, found: dict[int, BlockRecord]) -> dict[int, BlockRecord]:
        """Keep only ciphertext if there is a key, and only plaintext if there is none; forget the others.

        Raises `ConfigError` if everything is ciphertext and there is no key, or a different one: that is a mistake, and
        nothing is lost yet.
        """
        is_sealing = self._files.cipher is not None
        self._check_key(found)
        if not is_sealing and not any_sealed(found):
            return found
        ours = {
            number: record
            for number, record in found.items()
            if bool(record.seal) == is_sealing and (not is_sealing or record.block_bytes <= _MAX_SEALED_BYTES)
        }
        if not is_sealing and found and not ours:
            raise ConfigError(f"the blocks in {self.folder} are encrypted: their server needs the key file")
        if num_others := len(found) - len(ours):
            self.losses["not encrypted" if is_sealing else "encrypted"] += num_others
            if is_sealing:
                logger.warning(
                    "disk store %s: %d blocks were written without a key and are forgotten; their bytes stay in %s "
                    "until they are overwritten: remove the folder to get rid of them",
                    self.folder,
                    num_others,
                    PAYLOADS_NAME,
                )
        return ours

    def _check_key(self, found: dict[int, BlockRecord]) -> None:
        """Record in the header which key is in use, once that is certain: earlier ciphertexts may have another."""
        cipher, records = self._files.cipher, self._records
        if cipher is None:
            if not any_sealed(found):
                records.key_check = b""
        elif not any_sealed(found) or (not records.key_check and self._opens_any(found, cipher)):
            records.key_check = cipher.key_check
        elif records.key_check not in (b"", cipher.key_check):
            raise ConfigError(
                f"the blocks in {self.folder} are encrypted with another key: use the key file of before, or an empty "
                "folder"
            )

    def _opens_any(self, found: dict[int, BlockRecord], cipher: BlockCipher) -> bool:
        """Whether at least one of a few ciphertexts was made with our key."""
        end = self._payloads.nbytes // UNIT_BYTES
        sealed = (record for record in found.values() if record.seal and record.start + units_of(record) <= end)
        return any(self._opens(record, cipher) for record in itertools.islice(sealed, _MAX_TRIED))

    def _opens(self, record: BlockRecord, cipher: BlockCipher) -> bool:
        space = StoreSpace(record.namespace, "", record.block_bytes, record.block_tokens, None)
        try:
            into = memoryview(bytearray(space.block_bytes))
            with cipher.staged(space.slot_bytes) as staging, staging[: space.slot_bytes] as slot:
                self._payloads.read([record.start], [slot], space.block_bytes, space.slot_bytes)
                cipher.open(record.seal, space.about(record.hash), staging, into)
        except (OSError, MemoryError, NotAuthentic):
            return False
        return True

    def _shrink(self, plan: ShrinkPlan) -> dict[int, BlockRecord]:
        """Carry out a plan so that a crash at any moment loses at most what the plan drops."""
        if plan.dropped:
            self.losses["over the budget"] += len(plan.dropped)
            self._records.wipe(plan.dropped)
            self._records.sync()
        if plan.moved:
            logger.info("disk store %s: moving %d blocks into a smaller file", self.folder, len(plan.moved))
        kept = dict(plan.kept)
        for number, (record, start) in plan.moved.items():
            slot_bytes = slot_bytes_of(record.block_bytes)
            try:
                payload = memoryview(bytearray(record.block_bytes))
                self._payloads.read([record.start], [payload], record.block_bytes, slot_bytes)
            except (OSError, MemoryError):
                self.losses["unreadable"] += 1
                self._records.wipe([number])
                continue
            self._payloads.write([start], [payload], record.block_bytes, slot_bytes)
            kept[number] = record._replace(start=start, sequence=self._next_sequence)
            self._next_sequence += 1
        self._payloads.sync()
        self._records.write((number, kept[number]) for number in plan.moved if number in kept)
        renumbered = {here: there for here, there in plan.renumbered.items() if here in kept}
        self._records.write((there, kept[here]) for here, there in renumbered.items())
        self._records.sync()
        kept = {renumbered.get(number, number): record for number, record in kept.items()}
        self._records.cut(plan.records_bytes)
        return dict(sorted(kept.items(), key=lambda item: item[1].start))

    def _adopt(self, kept: dict[int, BlockRecord]) -> list[StoredBlock]:
        """Add the blocks of `kept`, which is ordered by place."""
        blocks = []
        for number, record in kept.items():
            space = self._spaces.get(record.namespace)
            if space is None:
                share = self._share_of(record.name)
                space = StoreSpace(record.namespace, record.name, record.block_bytes, record.block_tokens, share)
                self._spaces[record.namespace] = space
            block = StoredBlock(record.start, space.index.block_units)
            block.hash = record.hash
            block.index = space.index
            block.space = space
            block.record = number
            block.seal = record.seal
            block.checksum = self._masked(record.checksum, record.seal) if record.seal else record.checksum
            block.sequence = record.sequence
            block.used_at = record.used_at
            block.is_pinned = record.is_pinned
            blocks.append(block)
        return blocks

    # --- private: room ---------------------------------------------------------------------------------------------

    def _take_records(self, block_units: int, count: int, requester: Share) -> list[int]:
        """Numbers for up to `count` records, after growing the files as far as allowed and needed. May do I/O.

        Empty only if everything is in use.
        """
        with self._lock:
            if len(self._free_records) >= count and not self._should_grow(count * block_units):
                return [self._free_records.popleft() for _ in range(count)]
        with self._meta_lock:
            self._grow(count * block_units, block_units)
            if not self._free_records and not self._add_records(block_units):
                with self._lock:
                    self._pool.evict(1, requester)
        if not self._free_records:
            self._wipe_evicted()
        with self._lock:
            return [self._free_records.popleft() for _ in range(min(count, len(self._free_records)))]

    def _should_grow(self, units: int) -> bool:
        return not self._is_full and not self._pool.has_room(units) and self._growable_units() > 0

    def _growable_units(self) -> int:
        return (self._limit_bytes - self._records.nbytes) // UNIT_BYTES - self._pool.num_units

    def _grow(self, units: int, block_units: int) -> None:
        """Extend the file by at least `units`, if allowed, with records for it; a full disk means a smaller budget."""
        with self._lock:
            if not self._should_grow(units):
                return
        step = min(max(self._limit_bytes // 64, _MIN_GROWTH_BYTES), _MAX_GROWTH_BYTES)
        step = max(step // UNIT_BYTES, units)
        # Records come first: once payloads had all the room, more records would cost payloads at the file's end.
        needed = (self._pool.free_units + min(step, self._growable_units())) // block_units
        needed += min(needed // 8, _SPARE_RECORDS)  # for blocks in progress while their victims' records are wiped
        while (
            len(self._free_records) < needed
            and self._growable_units() > self._step_bytes // UNIT_BYTES
            and self._add_records(block_units)
        ):
            pass
        size = self._pool.num_units * UNIT_BYTES
        step = min(step, self._growable_units()) * UNIT_BYTES
        if step <= 0:
            return
        while True:
            try:
                self._payloads.allocate(size, step)
                break
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                step = step // 2 // UNIT_BYTES * UNIT_BYTES
                if step < block_units * UNIT_BYTES:
                    self._say_full(size)
                    return
        with self._lock:
            self._pool.extend(step // UNIT_BYTES)

    def _add_records(self, block_units: int) -> bool:
        """Add a step of records, in the room of payloads at the file's end if blocks of this size lack records."""
        with self._lock:
            missing = self._step_bytes // UNIT_BYTES - self._growable_units()
            if missing > 0 and self._records.num_records * block_units >= self._pool.num_units:
                return False
            if missing > 0 and (missing > self._pool.num_units or not self._pool.shrink(missing)):
                return False
        if missing > 0:
            self._wipe_evicted()
            self._payloads.cut(self._pool.num_units * UNIT_BYTES)
        try:
            numbers = self._records.grow(self._step_bytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._say_full(self._pool.num_units * UNIT_BYTES)
            return False
        with self._lock:
            self._free_records.extend(numbers)
        return True

    def _say_full(self, size: int) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "disk store %s: the disk is full; continuing with %s of %s",
                self.folder,
                format_size(size),
                format_size(self.file_space),
            )

    def _sync_folder(self) -> None:
        """Sync the files' names too, once."""
        if not self._is_folder_synced:
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._is_folder_synced = True

    # --- private: blocks -------------------------------------------------------------------------------------------

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
                if numbers and self._should_grow(len(numbers) * space.index.block_units):
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
                must_wipe = bool(self._to_wipe) or self._num_wiping > 0
            if must_wipe:
                self._wipe_evicted()
            if blocks:
                self._write_payloads(space, blocks, [payloads[position] for position in grant.positions])
                self._records.write((block.record, self._record_of(block)) for block in blocks)
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
                    self._free_records.extend(numbers)
                    self._free_records.extend(block.record for block in unwritten)
                    self._pool.free(blocks)
        return outcomes

    def _write_payloads(self, space: StoreSpace, blocks: Sequence[StoredBlock], payloads: list[memoryview]) -> None:
        with contextlib.ExitStack() as stack:
            if (cipher := self._files.cipher) is not None:
                for position, block in enumerate(blocks):
                    staging = stack.enter_context(cipher.staged(space.slot_bytes))
                    payload = payloads[position][: space.block_bytes]
                    block.seal = cipher.seal(space.about(block.hash), payload, staging, space.slot_bytes)
                    payloads[position] = stack.enter_context(staging[: space.slot_bytes])
            self._payloads.write([block.start for block in blocks], payloads, space.block_bytes, space.slot_bytes)

    def _opened(self, block: StoredBlock, into: memoryview, cipher: BlockCipher) -> BlockCorrupt | None:
        """Fill `into` from ciphertext. Raises `OSError`."""
        space = block.space
        with cipher.staged(space.slot_bytes) as staging, staging[: space.slot_bytes] as slot:
            self._payloads.read([block.start], [slot], space.block_bytes, space.slot_bytes)
            try:
                cipher.open(block.seal, space.about(block.hash), staging, into[: space.block_bytes])
            except NotAuthentic as error:
                self._lose(block, "not authentic")
                return BlockCorrupt(f"block {block.hash.hex()[:12]} on disk is not authentic: {error}")
        return self._verified(block, into)

    def _masked(self, checksum: int, seal: bytes) -> int:
        """The checksum as in the record of a ciphertext, and back."""
        return self._files.cipher.masked(checksum, seal) if seal and self._files.cipher is not None else checksum

    def _record_of(self, block: StoredBlock) -> BlockRecord:
        space = block.space
        return BlockRecord(
            space.namespace,
            block.hash,
            block.start,
            space.block_bytes,
            space.block_tokens,
            block.sequence,
            block.used_at,
            self._masked(block.checksum, block.seal),
            space.name,
            block.is_pinned,
            block.seal,
        )

    def _verified(self, block: StoredBlock, payload: memoryview) -> BlockCorrupt | None:
        space = block.space
        found = checksum_of(space.namespace, block.hash, payload[: space.block_bytes])
        if found == block.checksum:
            return None
        self._lose(block, "corrupt")
        return BlockCorrupt(
            f"block {block.hash.hex()[:12]} has checksum {found:016x} on disk, not {block.checksum:016x}"
        )

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
        self._to_wipe.append(block)
        self._ghosts.add(block.hash, block.index.scope)

    def _wipe_evicted(self) -> None:
        """Wipe the records of all blocks evicted so far, before anything is written to their room."""
        with self._lock:
            self._num_wiping += 1
        try:
            with self._wipe_lock:
                with self._lock:
                    blocks, self._to_wipe = self._to_wipe, []
                try:
                    self._wipe(blocks)
                except BaseException:
                    with self._lock:
                        self._to_wipe += blocks
                    raise
        finally:
            with self._lock:
                self._num_wiping -= 1

    def _wipe(self, blocks: Sequence[StoredBlock]) -> None:
        self._records.wipe(block.record for block in blocks)
        with self._lock:
            self._free_records.extend(block.record for block in blocks)

    def _lose(self, block: StoredBlock, kind: str) -> None:
        with self._lock:
            self.losses[kind] += 1
        self.drop(block.space, [block.hash])


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Turn off the garbage collector: scanning hundreds of thousands of new objects that all stay takes longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
