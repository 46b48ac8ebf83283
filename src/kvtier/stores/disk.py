"""Blocks in one preallocated file: crash-safe, checksummed, never larger than its budget. Thread-safe.

    superblock | superblock | chunks of records and blocks of any sizes, in units of 4 KiB

The file is one space as an arena is: blocks of several models share it, the coldest leave first. To write a block, the
records of what it replaces are wiped, then its payload is written (direct I/O), then its record. So whatever instant
the process dies, a record either names whole bytes or does not exist; and the checksum over key and payload is verified
on every read, so that whatever else happens to the file, wrong bytes are never returned. The index in memory is rebuilt
from the records. `_lock` guards index and accounts and is never held over I/O; `_meta_lock` orders the file's growth.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import Block, BlockPool, PrefixIndex, Presence
from kvtier.blocks.space import TakenRegion
from kvtier.errors import BlockCorrupt, ConfigError, TierFull, TierRefused
from kvtier.memory.checksum import checksum_of
from kvtier.memory.copying import address_of
from kvtier.sizes import format_size
from kvtier.stores.files import Files
from kvtier.stores.records import (
    FREE_RECORD,
    NUM_SUPERBLOCKS,
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    UNIT_BYTES,
    BlockRecord,
    DamagedRecord,
    Superblock,
    UnknownFormat,
    decode_records,
    decode_superblocks,
    encode_block,
    encode_superblock,
)

logger = logging.getLogger(__name__)

_DATA_NAME = "blocks.kvtier"
_LOCK_NAME = "lock"
_ROOT_UNITS = NUM_SUPERBLOCKS * SUPERBLOCK_BYTES // UNIT_BYTES
_SMALL_CHUNK_BYTES = 64 << 10
_LARGE_CHUNK_BYTES = 1 << 20
_LARGE_FILE_BYTES = 4 << 30
_MIN_GROWTH_BYTES = 1 << 20
_MAX_GROWTH_BYTES = 256 << 20
_RECENCY_BATCH = 512
_MAP_SHARE = 256
MIN_FILE_BYTES = NUM_SUPERBLOCKS * SUPERBLOCK_BYTES + _SMALL_CHUNK_BYTES + 2 * UNIT_BYTES


def holds_store(folder: Path) -> bool:
    """A store has written into `folder`."""
    return (folder / _DATA_NAME).is_file()


class StoredBlock(Block):
    """A block's place in the file, and what its record says."""

    __slots__ = ("checksum", "record", "sequence", "space", "used_at")

    space: StoreSpace
    record: int
    checksum: int
    sequence: int
    used_at: int


@dataclass(slots=True)
class _WaitingRecord:
    """A record on its way to the file."""

    offset: int
    raw: bytes
    is_done: bool = False
    error: OSError | None = None


class StoreSpace:
    """One namespace's blocks in a store."""

    def __init__(self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int) -> None:
        self.namespace = namespace
        self.name = name
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.slot_bytes = slot_bytes_of(block_bytes)
        self.index = PrefixIndex(self.slot_bytes // UNIT_BYTES)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found on opening: blocks that are back, and what was lost, by kind."""

    num_blocks: int
    losses: dict[str, int]


class DiskStore:
    """Owns `folder` (one process at a time) and the file in it."""

    def __init__(self, folder: Path, file_space: int, *, files: Files | None = None) -> None:
        """Raises `ConfigError` when the folder cannot be used: not writable, in use, of an unknown format, too small.

        Raises `OSError` when the device fails.
        """
        if file_space < MIN_FILE_BYTES:
            raise ConfigError(f"file space must be at least {format_size(MIN_FILE_BYTES)}")
        self.folder = folder
        self.file_space = file_space
        self.losses: Counter[str] = Counter()
        self._files = Files() if files is None else files
        self._lock = threading.Lock()
        self._meta_lock = threading.Lock()
        self._pool = BlockPool(0, make=StoredBlock, on_evict=self._note_evicted)
        self._spaces: dict[Namespace, StoreSpace] = {}
        self._free_records: deque[int] = deque()
        self._wipe_lock = threading.Lock()
        self._record_lock = threading.Lock()
        self._waiting_records: list[_WaitingRecord] = []
        self._to_wipe: list[StoredBlock] = []
        self._touched: dict[StoredBlock, None] = {}
        self._next_sequence = 1
        self._next_use = 1
        self._staging: deque[mmap.mmap] = deque()
        self._is_full = False
        with contextlib.ExitStack() as undo:
            self._lock_fd = self._take_folder()
            undo.callback(os.close, self._lock_fd)
            self._limit_bytes = self._room_for_data()
            self._open_data()
            undo.callback(self._close_data)
            self.recovery = self._recover()
            undo.pop_all()

    # --- what is there ---------------------------------------------------------------------------------------------

    def open(self, namespace: Namespace, name: str, block_bytes: int, block_tokens: int) -> StoreSpace:
        """The space of a namespace. Raises `TierRefused` for another block size than it has."""
        with self._lock:
            space = self._spaces.get(namespace)
            if space is None or (space.block_bytes != block_bytes and not len(space.index)):
                space = self._spaces[namespace] = StoreSpace(namespace, name, block_bytes, block_tokens)
        if space.block_bytes != block_bytes:
            raise TierRefused(
                f"namespace {namespace.hex()[:12]} has blocks of {space.block_bytes} bytes on disk, not {block_bytes}"
            )
        return space

    def contains(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._lock:
            return [space.index.presence(block_hash) is Presence.READY for block_hash in hashes]

    def match(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> list[StoredBlock]:
        """Reference the longest stored prefix of `hashes`; `free` each block once it was read."""
        with self._lock:
            return self._pool.match(space.index, hashes).blocks  # type: ignore[return-value]

    def free(self, blocks: Sequence[StoredBlock]) -> None:
        """Return references; the blocks were used now."""
        with self._lock:
            for block in reversed(blocks):
                self._use(block)
            self._pool.free(blocks)

    def touch(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> None:
        """What is stored of `hashes` was used now; the first of them is the last to go."""
        with self._lock:
            found = [space.index.blocks.get(block_hash) for block_hash in hashes]
            blocks = [block for block in found if isinstance(block, StoredBlock) and block.is_ready]
            for block in reversed(blocks):
                self._use(block)
            self._pool.touch(blocks)

    # --- bytes -----------------------------------------------------------------------------------------------------

    def write(self, space: StoreSpace, block_hash: BlockHash, payload: memoryview, checksum: int | None = None) -> bool:
        """Store a block. When it returns the block survives the end of the process. False when it was there already.

        `payload` has `block_bytes`, or `slot_bytes` of page-aligned memory, which then is written without a copy.
        Raises `TierFull` without room, `OSError` when the device fails; nothing is stored then.
        """
        body = payload[: space.block_bytes]
        if checksum is None:
            checksum = checksum_of(space.namespace, block_hash, body)
        while True:
            self._prepare(space)
            with self._lock:
                if block_hash in space.index.blocks:
                    return False
                if self._free_records:
                    grant = self._pool.reserve(space.index, [block_hash])
                    if not grant.blocks:
                        raise TierFull(f"the disk store has no room for a block of {format_size(space.block_bytes)}")
                    block = grant.blocks[0]
                    assert isinstance(block, StoredBlock)
                    block.space = space
                    block.record = self._free_records.popleft()
                    block.checksum = checksum
                    block.sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
                    block.used_at, self._next_use = self._next_use, self._next_use + 1
                    break
        try:
            self._wipe_evicted()
            self._write_payload(block, payload)
            self._write_record(block)
            with self._lock:
                was_dropped = not self._pool.commit([block])
            if was_dropped:
                self._files.write(self._buffered_fd, FREE_RECORD, self._record_offset(block.record))
        except BaseException:
            with self._lock:
                self._free_records.append(block.record)
                self._pool.free([block])
            raise
        with self._lock:
            if was_dropped:
                self._free_records.append(block.record)
            self._pool.free([block])
        return not was_dropped

    def read(self, block: StoredBlock, into: memoryview) -> None:
        """Fill `into` and verify it. `into` is as for `write`; the caller holds a reference on `block`.

        Raises `BlockCorrupt`, having dropped the block, when the bytes are not those that were written.
        """
        space = block.space
        try:
            self._read_payload(block, into)
        except OSError as error:
            self._lose(block, "unreadable")
            raise BlockCorrupt(f"a block on disk cannot be read: {error.strerror or error}") from error
        found = checksum_of(space.namespace, block.hash, into[: space.block_bytes])
        if found != block.checksum:
            self._lose(block, "corrupt")
            raise BlockCorrupt(
                f"block {block.hash.hex()[:12]} has checksum {found:016x} on disk, not {block.checksum:016x}"
            )

    def flush(self, *, fsync: bool) -> None:
        """Everything written before survives the end of the process, and with `fsync` a power cut."""
        self.save_recency()
        if fsync:
            self._files.sync(self._fd)

    def save_recency(self) -> None:
        """Write down which blocks were used since the last time."""
        while True:
            batch: list[tuple[StoredBlock, bytes]] = []
            with self._wipe_lock:  # a record that is being wiped must not be written again afterwards
                with self._lock:
                    while self._touched and len(batch) < _RECENCY_BATCH:
                        block = next(iter(self._touched))
                        del self._touched[block]
                        if block.is_ready and not block.is_held:
                            self._pool.hold(block)
                            batch.append((block, _encode(block)))
                if not batch:
                    return
                try:
                    records = [_WaitingRecord(self._record_offset(block.record), raw) for block, raw in batch]
                    self._write_records(records)
                    for record in records:
                        if record.error is not None:
                            raise record.error
                finally:
                    with self._lock:
                        for block, _ in batch:
                            self._pool.let_go(block)

    # --- forgetting ------------------------------------------------------------------------------------------------

    def drop(self, space: StoreSpace, hashes: Sequence[BlockHash] | None = None) -> int:
        """Forget blocks, all of the namespace by default."""
        with self._lock:
            wanted = list(space.index.blocks) if hashes is None else hashes
            gone = [block for block_hash in wanted if (block := space.index.blocks.get(block_hash)) is not None]
            ready = [block for block in gone if isinstance(block, StoredBlock) and block.is_ready]
            # Referenced until their records are wiped: nobody may take their room before.
            self._pool.reference(ready)
            # Those being written too: whoever writes them wipes the record then.
            num_dropped = self._pool.drop(space.index, [block.hash for block in gone])
        try:
            with self._wipe_lock:
                self._wipe(ready)
        finally:
            with self._lock:
                self._pool.free(ready)
        return num_dropped

    def pin(self, space: StoreSpace, hashes: Sequence[BlockHash]) -> int:
        """Keep what is stored of `hashes` from eviction until `unpin` or `drop`, at most half of the budget.

        Written down with recency: over restarts too.
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

    def blocks(self, space: StoreSpace) -> list[tuple[BlockHash, bool]]:
        """Hashes of what is stored, and whether each is pinned."""
        with self._lock:
            return [(block.hash, block.is_pinned) for block in space.index.blocks.values() if block.is_ready]

    def verify(self, space: StoreSpace, block_hash: BlockHash) -> bool:
        """Read a block and compare its checksum; one that is wrong is dropped. Does not count as a use."""
        with self._lock:
            block = space.index.blocks.get(block_hash)
            if not isinstance(block, StoredBlock) or not block.is_ready or block.is_held:
                return block is not None
            self._pool.hold(block)
        try:
            with self._staged(space) as slot:
                self.read(block, slot)
            return True
        except BlockCorrupt:
            return False
        finally:
            with self._lock:
                self._pool.let_go(block)

    # --- looking ---------------------------------------------------------------------------------------------------

    def spaces(self) -> list[StoreSpace]:
        with self._lock:
            return list(self._spaces.values())

    def levels(self) -> dict[str, float]:
        with self._lock:
            return {
                "file_bytes": self._pool.num_units * UNIT_BYTES,
                "file_space_bytes": self.file_space,
                "used_bytes": (self._pool.num_units - self._pool.free_units) * UNIT_BYTES,
                "blocks": sum(len(space.index) for space in self._spaces.values()),
                "evicted_blocks": self._pool.num_evicted,
            }

    def info(self, space: StoreSpace) -> dict[str, int]:
        """What the log line of a recovery says of a namespace."""
        with self._lock:
            num_blocks = (self._limit_bytes // UNIT_BYTES - _ROOT_UNITS) // space.index.block_units
            num_full = len(space.index)
        return {
            "block_size": space.block_tokens,
            "num_blocks": num_blocks,
            "num_full_blocks": num_full,
            "num_free_blocks": num_blocks - num_full,
        }

    def is_in_place(self) -> bool:
        """The file we write is still the one in the folder."""
        try:
            there, ours = os.stat(self.folder / _DATA_NAME), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def close(self) -> None:
        """Write down recency and let go of the folder."""
        try:
            self.save_recency()
        except OSError as error:
            logger.warning("disk store %s: recency was not saved: %s", self.folder, error)
        self._close_data()
        os.close(self._lock_fd)

    # --- private: opening ------------------------------------------------------------------------------------------

    def _take_folder(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the KV cache folder {self.folder} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"the KV cache folder {self.folder} is in use by another process") from error
        return fd

    def _room_for_data(self) -> int:
        """The budget less whatever else takes room: other files in the folder, the filesystem's map of a large file."""
        others = 0
        for path in self.folder.rglob("*"):
            if path.name != _DATA_NAME and path.is_file():
                others += max(path.stat().st_size, path.stat().st_blocks * 512)
        room = self.file_space - others
        limit = (room - max(UNIT_BYTES, room // _MAP_SHARE)) // UNIT_BYTES * UNIT_BYTES
        if room < MIN_FILE_BYTES:
            raise ConfigError(
                f"other files in {self.folder} take {format_size(others)} of the {format_size(self.file_space)} allowed"
            )
        return limit

    def _open_data(self) -> None:
        path = self.folder / _DATA_NAME
        self._set_aside_old(path)
        try:
            self._buffered_fd = self._files.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"the KV cache folder {self.folder} cannot be used: {error.strerror}") from error
        try:
            self._fd = self._files.open(path, os.O_RDWR | os.O_DIRECT)
            self._is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._files.close(self._buffered_fd)
                raise
            logger.warning("disk store %s: this filesystem has no direct I/O; using buffered I/O", self.folder)
            self._fd = self._files.open(path, os.O_RDWR)
            self._is_direct = False

    def _set_aside_old(self, path: Path) -> None:
        """An older format is moved out of the way, a newer one refused: neither is ever written over."""
        if not path.exists():
            return
        fd = self._files.open(path, os.O_RDONLY)
        try:
            decode_superblocks(self._read_superblocks(fd))
        except UnknownFormat as unknown:
            if unknown.version > 1:
                raise ConfigError(
                    f"{path} has format version {unknown.version}, which this kvtier does not know; "
                    "use a newer kvtier or another folder"
                ) from unknown
            aside = path.with_name(f"{_DATA_NAME}.version-{unknown.version}")
            os.replace(path, aside)
            logger.warning("disk store: %s has an old format and was set aside as %s", path, aside.name)
            self._limit_bytes = self._room_for_data()
        finally:
            self._files.close(fd)

    def _read_superblocks(self, fd: int) -> list[bytes]:
        copies = []
        for number in range(NUM_SUPERBLOCKS):
            raw = bytearray(SUPERBLOCK_BYTES)
            length = self._files.read_into(fd, memoryview(raw), number * SUPERBLOCK_BYTES)
            copies.append(bytes(raw[:length]))
        return copies

    def _close_data(self) -> None:
        self._files.close(self._fd)
        self._files.close(self._buffered_fd)

    def _recover(self) -> Recovery:
        size = self._files.size(self._buffered_fd)
        superblock = decode_superblocks(self._read_superblocks(self._buffered_fd))
        if superblock is None:
            if size:
                self.losses["superblock"] += 1
            self._start_anew()
            return Recovery(0, dict(self.losses))
        self._superblock = superblock
        num_units = min(size, self._limit_bytes) // UNIT_BYTES
        found = self._read_records()
        self._next_sequence = max((record.sequence for record in found.values()), default=0) + 1
        self._next_use = max((record.used_at for record in found.values()), default=0) + 1
        kept = self._choose(found, num_units, size // UNIT_BYTES)
        blocks: list[StoredBlock] = self._adopt(kept)
        chunk_units = superblock.chunk_bytes // UNIT_BYTES
        chunks: list[TakenRegion] = [TakenRegion(start, chunk_units) for start in superblock.chunks]
        has_all_chunks = all(chunk.start + chunk_units <= num_units for chunk in chunks)
        regions = [TakenRegion(0, _ROOT_UNITS), *blocks, *(chunks if has_all_chunks else ())]
        cold_to_warm = sorted(blocks, key=lambda block: block.used_at)
        self._pool.restore(num_units, sorted(regions, key=lambda region: region.start), cold_to_warm)
        if has_all_chunks:
            self._write_superblock(superblock.chunks)  # the other copy may be damaged
            self._collect_free_records(found, kept)
        else:
            self._rewrite_records(blocks)
        if size > num_units * UNIT_BYTES:
            self._files.truncate(self._buffered_fd, num_units * UNIT_BYTES)
        return Recovery(sum(block.is_ready for block in blocks), dict(self.losses))

    def _start_anew(self) -> None:
        """An empty store over whatever was in the file."""
        self._files.truncate(self._buffered_fd, 0)
        self._files.allocate(self._buffered_fd, 0, _ROOT_UNITS * UNIT_BYTES)
        chunk_bytes = _LARGE_CHUNK_BYTES if self._limit_bytes >= _LARGE_FILE_BYTES else _SMALL_CHUNK_BYTES
        self._superblock = Superblock(0, chunk_bytes, ())
        for _ in range(NUM_SUPERBLOCKS):
            self._write_superblock(self._superblock.chunks)
        self._pool.restore(_ROOT_UNITS, [TakenRegion(0, _ROOT_UNITS)], ())

    def _read_records(self) -> dict[int, BlockRecord]:
        """Block records by number. What cannot be read is counted and wiped."""
        found: dict[int, BlockRecord] = {}
        chunk_bytes = self._superblock.chunk_bytes
        for position, start in enumerate(self._superblock.chunks):
            raw = bytearray(chunk_bytes)
            if self._files.read_into(self._buffered_fd, memoryview(raw), start * UNIT_BYTES) < chunk_bytes:
                self.losses["truncated records"] += 1
                continue
            for number, record in enumerate(decode_records(bytes(raw)), position * (chunk_bytes // RECORD_BYTES)):
                if isinstance(record, BlockRecord):
                    found[number] = record
                elif isinstance(record, DamagedRecord):
                    self.losses["damaged record"] += 1
                    self._files.write(self._buffered_fd, FREE_RECORD, self._record_offset(number))
        return found

    def _choose(self, found: dict[int, BlockRecord], num_units: int, file_units: int) -> dict[int, BlockRecord]:
        """The records to believe: inside the file and the budget, the newest of those that claim one key or room."""
        keys: set[tuple[Namespace, BlockHash]] = set()
        sizes: dict[Namespace, int] = {}
        kept: list[tuple[int, BlockRecord]] = []
        for number, record in sorted(found.items(), key=lambda item: item[1].sequence, reverse=True):
            end = record.start + _units_of(record)
            key = (record.namespace, record.hash)
            if end > num_units:
                self.losses["truncated" if end > file_units else "over the budget"] += 1
            elif key in keys or sizes.setdefault(record.namespace, record.block_bytes) != record.block_bytes:
                self.losses["replaced"] += 1
            else:
                keys.add(key)
                kept.append((number, record))
        kept.sort(key=lambda item: item[1].start)
        chunk_units = self._superblock.chunk_bytes // UNIT_BYTES
        occupied = [(0, _ROOT_UNITS), *((start, start + chunk_units) for start in self._superblock.chunks)]
        return self._without_overlaps(kept, sorted(occupied))

    def _without_overlaps(
        self, kept: list[tuple[int, BlockRecord]], occupied: list[tuple[int, int]]
    ) -> dict[int, BlockRecord]:
        """Of two records for the same room the newer is right: the older one's wipe was lost."""
        chosen: list[tuple[int, BlockRecord]] = []
        for number, record in kept:
            end = record.start + _units_of(record)
            position = bisect.bisect_right(occupied, (record.start, end)) - 1
            beside = occupied[max(position, 0) : position + 2]
            if any(record.start < taken_end and start < end for start, taken_end in beside):
                self.losses["replaced"] += 1
                continue
            if chosen and record.start < chosen[-1][1].start + _units_of(chosen[-1][1]):
                self.losses["replaced"] += 1
                if record.sequence < chosen[-1][1].sequence:
                    continue
                chosen.pop()
            chosen.append((number, record))
        return dict(chosen)

    def _adopt(self, kept: dict[int, BlockRecord]) -> list[StoredBlock]:
        blocks = []
        for number, record in kept.items():
            space = self._spaces.get(record.namespace)
            if space is None:
                space = StoreSpace(record.namespace, record.name, record.block_bytes, record.block_tokens)
                self._spaces[record.namespace] = space
            block = StoredBlock(record.start, space.index.block_units)
            block.hash = record.hash
            block.index = space.index
            block.space = space
            block.record = number
            block.checksum = record.checksum
            block.sequence = record.sequence
            block.used_at = record.used_at
            block.is_pinned = record.is_pinned
            blocks.append(block)
        return blocks

    def _collect_free_records(self, found: dict[int, BlockRecord], kept: dict[int, BlockRecord]) -> None:
        for number in found.keys() - kept.keys():
            self._files.write(self._buffered_fd, FREE_RECORD, self._record_offset(number))
        num_records = len(self._superblock.chunks) * (self._superblock.chunk_bytes // RECORD_BYTES)
        self._free_records.extend(number for number in range(num_records) if number not in kept)

    def _rewrite_records(self, blocks: list[StoredBlock]) -> None:
        """Some chunks lie beyond what the file may be now: write all records into new ones, then change over."""
        per_chunk = self._superblock.chunk_bytes // RECORD_BYTES
        starts: list[int] = []
        for _ in range(max(1, -(-len(blocks) // per_chunk))):
            region = self._pool.take_raw(self._superblock.chunk_bytes // UNIT_BYTES)
            if region is None:
                break
            starts.append(region.start)
        left = [block for block in blocks if block.is_ready]
        self._to_wipe.clear()
        for position, start in enumerate(starts):
            raw = bytearray()
            for block in left[position * per_chunk : (position + 1) * per_chunk]:
                block.record = position * per_chunk + len(raw) // RECORD_BYTES
                raw += _encode(block)
            data = bytes(raw).ljust(self._superblock.chunk_bytes, b"\0")
            self._files.write(self._buffered_fd, data, start * UNIT_BYTES)
        for _ in range(NUM_SUPERBLOCKS):
            self._write_superblock(tuple(starts))
        self._free_records.extend(range(len(left), len(starts) * per_chunk))

    # --- private: room ---------------------------------------------------------------------------------------------

    def _prepare(self, space: StoreSpace) -> None:
        """Let the file grow, and have a free record, before a block is placed. May do I/O."""
        with self._lock:
            if self._free_records and not self._should_grow(space.index.block_units):
                return
        with self._meta_lock:
            self._grow(space.index.block_units)
            while not self._free_records:
                self._add_chunk()

    def _should_grow(self, units: int) -> bool:
        can_grow = not self._is_full and (self._pool.num_units + units) * UNIT_BYTES <= self._limit_bytes
        return can_grow and not self._pool.has_room(units)

    def _grow(self, units: int) -> None:
        """Add a step to the file, at least `units`, within the budget; a full disk is a smaller budget."""
        with self._lock:
            if not self._should_grow(units):
                return
            size = self._pool.num_units * UNIT_BYTES
        step = min(max(self._limit_bytes // 64, _MIN_GROWTH_BYTES, units * UNIT_BYTES), _MAX_GROWTH_BYTES)
        step = max(step, units * UNIT_BYTES) // UNIT_BYTES * UNIT_BYTES
        step = min(step, self._limit_bytes - size)
        while True:
            try:
                self._files.allocate(self._buffered_fd, size, step)
                break
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                step = step // 2 // UNIT_BYTES * UNIT_BYTES
                if step < units * UNIT_BYTES:
                    self._is_full = True
                    logger.warning(
                        "disk store %s: the disk is full; going on with %s of %s",
                        self.folder,
                        format_size(size),
                        format_size(self.file_space),
                    )
                    return
        with self._lock:
            self._pool.extend(step // UNIT_BYTES)

    def try_growing_again(self) -> None:
        """A disk that was full may have room now."""
        self._is_full = False

    def _add_chunk(self) -> None:
        """More records: wipe a chunk, then name it in the superblock. Raises `TierFull` without room for one."""
        chunk_bytes = self._superblock.chunk_bytes
        units = chunk_bytes // UNIT_BYTES
        if len(self._superblock.chunks) >= Superblock.max_chunks:
            raise TierFull("the disk store has as many blocks as it can name")
        self._grow(units)
        with self._lock:
            region = self._pool.take_raw(units)
        if region is None:
            raise TierFull("the disk store has no room for its records")
        self._wipe_evicted()
        self._files.write(self._buffered_fd, bytes(chunk_bytes), region.start * UNIT_BYTES)
        first = len(self._superblock.chunks) * (chunk_bytes // RECORD_BYTES)
        chunks = (*self._superblock.chunks, region.start)
        for _ in range(NUM_SUPERBLOCKS):
            self._write_superblock(chunks)
        with self._lock:
            self._free_records.extend(range(first, first + chunk_bytes // RECORD_BYTES))

    def _write_superblock(self, chunks: tuple[int, ...]) -> None:
        """Write the older copy, so that the newer stays whole whatever happens."""
        superblock = Superblock(self._superblock.sequence + 1, self._superblock.chunk_bytes, chunks)
        position = superblock.sequence % NUM_SUPERBLOCKS
        self._files.write(self._buffered_fd, encode_superblock(superblock), position * SUPERBLOCK_BYTES)
        self._superblock = superblock

    # --- private: blocks -------------------------------------------------------------------------------------------

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

    def _write_record(self, block: StoredBlock) -> None:
        """Write a block's record, together with those of all others that wait to be written.

        A buffered write must wait until the direct ones on the file have drained: one for many costs the writers less.
        """
        waiting = _WaitingRecord(self._record_offset(block.record), _encode(block))
        with self._lock:
            self._waiting_records.append(waiting)
        with self._record_lock:
            if not waiting.is_done:
                with self._lock:
                    batch, self._waiting_records = self._waiting_records, []
                self._write_records(batch)
        if waiting.error is not None:
            raise waiting.error

    def _write_records(self, batch: list[_WaitingRecord]) -> None:
        batch.sort(key=lambda waiting: waiting.offset)
        first = 0
        for end in range(1, len(batch) + 1):
            if end < len(batch) and batch[end].offset == batch[end - 1].offset + RECORD_BYTES:
                continue
            run = batch[first:end]
            try:
                self._files.write(self._buffered_fd, b"".join(waiting.raw for waiting in run), run[0].offset)
            except OSError as error:
                for waiting in run:
                    waiting.error = error
            for waiting in run:
                waiting.is_done = True
            first = end

    def _wipe_evicted(self) -> None:
        """Wipe the records of all that was evicted so far, before anything is written where it was."""
        with self._wipe_lock:
            with self._lock:
                blocks, self._to_wipe = self._to_wipe, []
            try:
                self._wipe(blocks)
            except BaseException:
                with self._lock:
                    self._to_wipe += blocks
                raise

    def _wipe(self, blocks: Sequence[StoredBlock]) -> None:
        for block in blocks:
            self._files.write(self._buffered_fd, FREE_RECORD, self._record_offset(block.record))
        with self._lock:
            self._free_records.extend(block.record for block in blocks)

    def _lose(self, block: StoredBlock, kind: str) -> None:
        with self._lock:
            self.losses[kind] += 1
        self.drop(block.space, [block.hash])

    def _record_offset(self, number: int) -> int:
        chunk, position = divmod(number, self._superblock.chunk_bytes // RECORD_BYTES)
        return self._superblock.chunks[chunk] * UNIT_BYTES + position * RECORD_BYTES

    # --- private: payloads -----------------------------------------------------------------------------------------

    def _write_payload(self, block: StoredBlock, payload: memoryview) -> None:
        offset = block.start * UNIT_BYTES
        if self._can_go_directly(payload, block.space):
            self._files.write(self._fd, payload, offset)
            return
        with self._staged(block.space) as slot:
            slot[: block.space.block_bytes] = payload[: block.space.block_bytes]
            self._files.write(self._fd, slot, offset)

    def _read_payload(self, block: StoredBlock, into: memoryview) -> None:
        offset = block.start * UNIT_BYTES
        if self._can_go_directly(into, block.space):
            length = self._files.read_into(self._fd, into, offset)
        else:
            with self._staged(block.space) as slot:
                length = self._files.read_into(self._fd, slot, offset)
                into[: block.space.block_bytes] = slot[: block.space.block_bytes]
        if length < block.space.block_bytes:
            raise OSError(errno.EIO, "the file ends inside the block")

    def _can_go_directly(self, view: memoryview, space: StoreSpace) -> bool:
        if not self._is_direct:
            return len(view) <= space.slot_bytes
        return len(view) == space.slot_bytes and address_of(view) % UNIT_BYTES == 0

    @contextlib.contextmanager
    def _staged(self, space: StoreSpace) -> Iterator[memoryview]:
        """Aligned memory of a slot's size."""
        try:
            memory = self._staging.popleft()
        except IndexError:
            memory = mmap.mmap(-1, space.slot_bytes)
        if len(memory) < space.slot_bytes:
            memory.close()
            memory = mmap.mmap(-1, space.slot_bytes)
        with memoryview(memory) as whole, whole[: space.slot_bytes] as slot:
            yield slot
        self._staging.append(memory)


def _encode(block: StoredBlock) -> bytes:
    space = block.space
    return encode_block(
        BlockRecord(
            space.namespace,
            block.hash,
            block.start,
            space.block_bytes,
            space.block_tokens,
            block.sequence,
            block.used_at,
            block.checksum,
            space.name,
            block.is_pinned,
        )
    )


def _units_of(record: BlockRecord) -> int:
    return slot_bytes_of(record.block_bytes) // UNIT_BYTES
