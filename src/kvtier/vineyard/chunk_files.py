"""Chunks as files of one folder, which any number of processes and hosts write and read: names, format, bytes.

A chunk is the KV of some consecutive tokens; its name is a wide hash of all tokens up to its end, so a file never
changes once it exists. It is written elsewhere (`__temp`), synced and renamed: a reader sees the whole file or none.
The filesystem only has to rename atomically. `chunk_room` bounds the number of files.

A file is a row of segments of 4 MiB, the last one shorter; each begins with a page that names the chunk, the segment
and a checksum over both and its bytes. So segments move and are verified on their own, by several threads at once, and
payloads that lie in whole pages of memory move without a copy.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
import re
import stat
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtier.errors import ConfigError
from kvtier.memory.scattered import Scattered
from kvtier.stores.files import Files
from kvtier.stores.staging import PAGE_BYTES, SegmentStaging, StagingPool, whole_pages
from kvtier.vineyard.file_owner import give_up_name, owner_name
from kvtier.vineyard.folder_trust import WRITABLE_BY_OTHERS, check_folder

TEMP_FOLDER = "__temp"
TEMP_SUFFIX = ".tmp"
SEGMENT_BYTES = 4 << 20
_MAGIC = b"kvchunk1"
_HEAD = struct.Struct("<8s32sIIQ")
"""Magic, digest, number of the segment, payload bytes in it, checksum."""
_BODY_BYTES = SEGMENT_BYTES - PAGE_BYTES
_MAX_RUNS = 512
_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,9})")
_FOLDER = re.compile(r"[0-9a-f]{1,8}")
_RENAME_TRIES = 4


class Damage(enum.Enum):
    """Why an existing file is not a hit."""

    EMPTY = "empty"
    WRONG_SIZE = "wrong_size"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    OTHER_OWNER = "other_owner"
    UNREADABLE = "unreadable"

    @property
    def is_ours_to_remove(self) -> bool:
        """Whether the file, under a chunk's name, can never be read as a chunk, and so may be removed."""
        return self in (Damage.EMPTY, Damage.WRONG_SIZE, Damage.CORRUPT)


@dataclass(frozen=True, slots=True)
class ChunkName:
    """Where a chunk lies: `folder` helps people and keeps folders small, `digest` is the identity.

    `depth` counts the chunks before it, so that eviction can tell a prompt's end from its beginning.
    """

    folder: str
    digest: bytes
    depth: int

    @property
    def file_name(self) -> str:
        return f"{self.digest.hex()}-{self.depth}"


def depth_of(file_name: str) -> int | None:
    """The depth in a chunk's file name; None for a file that is not ours."""
    found = _NAME.fullmatch(file_name)
    return None if found is None else int(found[2])


def is_chunk_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment in flight. `parts` are its head and its payload, in the staging or in the caller's memory."""

    number: int
    staging: SegmentStaging
    parts: list[memoryview]

    @property
    def is_staged(self) -> bool:
        return self.parts[1].obj is self.staging.memory


class ChunkFiles:
    """The files of chunks of one size under `root`.

    Opening makes the folders and writes a probe: raises `ConfigError` if that fails, and, unless the folder
    `is_shared`, if other users could put files or folders in place of ours. Thread-safe.
    """

    def __init__(self, root: Path, payload_bytes: int, files: Files | None = None, *, is_shared: bool = False) -> None:
        self.root = root
        self._is_shared = is_shared
        self._own_uid = os.geteuid()
        self.temp = root / TEMP_FOLDER
        self.files = files or Files()
        self.payload_bytes = payload_bytes
        self.num_segments = -(-payload_bytes // _BODY_BYTES)
        last_bytes = PAGE_BYTES + whole_pages(payload_bytes - (self.num_segments - 1) * _BODY_BYTES)
        self.file_bytes = (self.num_segments - 1) * SEGMENT_BYTES + last_bytes
        self.owner = owner_name()
        self._numbers = itertools.count()
        self.staging = StagingPool(min(SEGMENT_BYTES, self.file_bytes))
        self.direct_flag = self._probe()
        if not is_shared:
            try:
                check_folder(self.temp, self._own_uid)
            except ConfigError:
                give_up_name(self.owner)
                raise

    def path_of(self, name: ChunkName) -> str:
        return f"{self.root}/{name.folder}/{name.file_name}"

    def status_of(self, name: ChunkName) -> os.stat_result | None:
        """The stat of a file that looks whole; None for anything else. Never raises."""
        try:
            status = os.stat(self.path_of(name))
        except OSError:
            return None
        is_whole = stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes
        return status if is_whole and self.is_trusted(status) else None

    def is_trusted(self, status: os.stat_result) -> bool:
        """Whether no other user made this file or can write it, or all users who can are trusted."""
        return self._is_shared or (status.st_uid == self._own_uid and not status.st_mode & WRITABLE_BY_OTHERS)

    def temp_path(self) -> Path:
        """A unique name in the temp folder."""
        return self.temp / f"{self.owner}-{next(self._numbers)}{TEMP_SUFFIX}"

    def make_temp_folder(self) -> None:
        """Create the folder and the root, for the owner only: chunk names reveal prompts. An existing root stays."""
        try:
            self.temp.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.temp.mkdir(mode=0o700, exist_ok=True)

    def offset_of(self, segment: int) -> int:
        return segment * SEGMENT_BYTES

    def range_of(self, segment: int) -> tuple[int, int]:
        """The range of payload bytes in a segment."""
        start = segment * _BODY_BYTES
        return start, min(start + _BODY_BYTES, self.payload_bytes)

    def moves_in_place(self, payload: Scattered, segment: int) -> bool:
        """Whether the segment's memory is suitable for direct I/O."""
        return payload.has_aligned(*self.range_of(segment), PAGE_BYTES, _MAX_RUNS)

    def _probe(self) -> int:
        """Write and sync a little, like a chunk. Returns the flag for direct I/O if the filesystem has it."""
        try:
            self.make_temp_folder()
            try:
                self._write_probe(os.O_DIRECT)
                return os.O_DIRECT
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._write_probe(0)
                return 0
        except OSError as error:
            give_up_name(self.owner)
            raise ConfigError(f"the chunk folder {self.root} cannot be used: {error.strerror}") from error

    def _write_probe(self, flag: int) -> None:
        path = self.temp_path()
        try:
            fd = self.files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag)
            try:
                self.files.write(fd, [SegmentStaging(PAGE_BYTES).head], 0)
                self.files.sync(fd)
                self._own_uid = os.fstat(fd).st_uid  # a file server may map us to another number
            finally:
                self.files.close(fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


class ChunkWriter:
    """Writes one chunk, segment by segment in any order and from any thread. The last segment puts it in place.

    `is_done`: the chunk is in place.
    """

    def __init__(self, store: ChunkFiles, name: ChunkName, source: Scattered) -> None:
        self.name = name
        self.is_done = False
        self._store = store
        self._source = source
        self._lock = threading.Lock()
        self._left = store.num_segments
        self._path: Path | None = None
        self._fd = -1

    def start(self, number: int) -> Segment:
        """Prepare a segment for writing. Never raises."""
        store = self._store
        start, end = store.range_of(number)
        staging = store.staging.take()
        if store.moves_in_place(self._source, number):
            parts = [staging.head, *self._source.views(start, end)]
        else:
            self._source.copy_to(staging.address + PAGE_BYTES, start, end)
            parts = staging.parts_of(end - start)
        checksum = _checksum(self.name.digest, number, parts[1:], end - start)
        _HEAD.pack_into(staging.head, 0, _MAGIC, self.name.digest, number, end - start, checksum)
        return Segment(number, staging, parts)

    def finish(self, segment: Segment) -> None:
        """Write the segment. Raises `OSError`; `close` then leaves nothing behind."""
        store = self._store
        try:
            store.files.write(self._opened(), segment.parts, store.offset_of(segment.number))
        finally:
            store.staging.give(segment.staging)
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._put_in_place()

    def close(self) -> None:
        """Remove a chunk that is not in place. No thread may still be writing it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._store.files.close(self._fd)
            self._fd = -1
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _opened(self) -> int:
        with self._lock:
            if self._fd < 0:
                path = self._store.temp_path()
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._store.direct_flag
                try:
                    self._fd = self._store.files.open(path, flags)
                except FileNotFoundError:
                    self._store.make_temp_folder()
                    self._fd = self._store.files.open(path, flags)
                self._path = path
            return self._fd

    def _put_in_place(self) -> None:
        files = self._store.files
        files.sync(self._fd)
        fd, self._fd = self._fd, -1
        files.close(fd)
        assert self._path is not None
        target = Path(self._store.path_of(self.name))
        for attempt in range(_RENAME_TRIES):
            try:
                os.replace(self._path, target)
                break
            except FileNotFoundError:
                if not self._path.exists() and self._store.status_of(self.name) is not None:
                    break  # NFS reports this when the answer to the first request was lost
                if attempt == _RENAME_TRIES - 1:
                    raise
                target.parent.mkdir(mode=0o700, exist_ok=True)  # its first chunk, or the empty folder was removed
        self._path = None
        self.is_done = True


class ChunkReader:
    """Reads one chunk into memory, segment by segment in any order and from any thread.

    `is_done`: all of it has arrived. `damage` says why an existing file was not a hit, and `errno` what the system
    reported for a file that could not be read; `used_at` is the time of the file's previous use.
    """

    def __init__(self, store: ChunkFiles, name: ChunkName, target: Scattered) -> None:
        self.name = name
        self.is_done = False
        self.damage: Damage | None = None
        self.errno = 0
        self.used_at = 0.0
        self._store = store
        self._target = target
        self._lock = threading.Lock()
        self._left = store.num_segments
        self._fd = -1

    def start(self, number: int) -> Segment:
        """Read a segment. Raises `OSError` for a miss of any kind."""
        store = self._store
        start, end = store.range_of(number)
        staging = store.staging.take()
        is_in_place = store.moves_in_place(self._target, number)
        parts = [staging.head, *self._target.views(start, end)] if is_in_place else staging.parts_of(end - start)
        try:
            length = store.files.read_into(self._opened(), parts, store.offset_of(number))
        except FileNotFoundError:
            raise
        except OSError as error:
            if self.damage is None:
                self.damage = Damage.UNREADABLE
                self.errno = error.errno or 0
            raise
        if length < sum(map(len, parts)):
            self._refuse(Damage.WRONG_SIZE)
        return Segment(number, staging, parts)

    def finish(self, segment: Segment) -> None:
        """Verify it and put it in place. Raises `OSError` for a miss; the target may then hold anything."""
        store = self._store
        start, end = store.range_of(segment.number)
        expected = (_MAGIC, self.name.digest, segment.number, end - start)
        *found, checksum = _HEAD.unpack_from(segment.staging.head)
        parts = segment.parts[1:]
        if tuple(found) != expected:
            self._refuse(Damage.CORRUPT)
        if checksum != _checksum(self.name.digest, segment.number, parts, end - start):
            if not segment.is_staged and self._is_whole_on_disk(segment.number, checksum):
                raise OSError(errno.EIO, "the caller's memory was changed while it was filled, or was passed twice")
            self._refuse(Damage.CORRUPT)
        if segment.is_staged:
            self._target.copy_from(segment.staging.address + PAGE_BYTES, start, end)
        store.staging.give(segment.staging)
        with self._lock:
            self._left -= 1
            if not self._left:
                self._close()
                self.is_done = True

    def _is_whole_on_disk(self, number: int, checksum: int) -> bool:
        """Read a segment again, into private memory."""
        store = self._store
        start, end = store.range_of(number)
        staging = store.staging.take()
        try:
            parts = staging.parts_of(end - start)
            if store.files.read_into(self._opened(), parts, store.offset_of(number)) < sum(map(len, parts)):
                return False
            return checksum == _checksum(self.name.digest, number, parts[1:], end - start)
        finally:
            store.staging.give(staging)

    def close(self) -> None:
        """No thread may still be reading it."""
        with self._lock:
            self._close()

    def _opened(self) -> int:
        store = self._store
        with self._lock:
            if self._fd < 0:
                # Non-blocking: opening must not wait, whatever is in a chunk's place, even a pipe.
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | store.direct_flag
                fd = store.files.open(Path(store.path_of(self.name)), flags)
                self._fd = fd
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    self._refuse(Damage.FOREIGN)
                if not store.is_trusted(status):
                    self._refuse(Damage.OTHER_OWNER)
                if status.st_size != store.file_bytes:
                    self._refuse(Damage.WRONG_SIZE if status.st_size else Damage.EMPTY)
                self.used_at = status.st_mtime
            return self._fd

    def _refuse(self, damage: Damage) -> None:
        self.damage = damage
        raise OSError(errno.EIO, f"{damage.value} file in a chunk's place")

    def _close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._store.files.close(self._fd)
            self._fd = -1


def _checksum(digest: bytes, segment: int, parts: Sequence[memoryview], nbytes: int) -> int:
    """The checksum of the first `nbytes` of `parts` and of the name: the right bytes in the wrong place do not pass."""
    summed = xxhash.xxh3_64(digest, seed=segment)
    for part in parts:
        summed.update(part[:nbytes])
        nbytes -= len(part)
    return summed.intdigest()
