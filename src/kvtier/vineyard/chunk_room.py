"""How many bytes of chunks a folder may hold, over all processes that write into it, and which are removed first.

No process keeps the folder's books, since any may die: the truth is a listing of the folder. A writer first announces
how much it will write, as the size of a sparse file of its own in the temp folder, then lists the folder, counts every
announcement, and writes only what fits. If two writers announce at once, at least the later sees both, so chunks and
writes in flight together never exceed the bound. (Where listings lag, as on NFS, so does the bound.) Listing costs time
for each file, so more is announced than one write needs.

A bound is for chunks of one file size, as chunks of one shape have; chunks of other sizes neither count towards it nor
are removed for it. An announcement contains the size and its writer's bound: the largest bound of the living writers
applies to all.

A file's mtime is the time of its last use: reading a chunk touches it. All times are the filesystem's own, so neither
mount options nor other hosts' clocks matter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.vineyard.chunk_files import TEMP_SUFFIX, ChunkFiles, depth_of, is_chunk_folder
from kvtier.vineyard.file_owner import give_up_name, is_surely_dead

ROOM_SUFFIX = ".room"
BEAT_S = 15.0
"""How often a writer gives a sign of life."""
STALE_S = 60.0
"""Time without a sign of life after which a writer of another host counts as dead."""
BUCKET_S = 5.0
"""Times of use in the same bucket count as equal."""
_MAX_SHARE_BYTES = 4 << 30
_SPARE_SHARE = 16
_EVICTED_SPARE_SHARE = 32
_TRIES = 8
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class _Found:
    """A chunk's file as listed."""

    path: str
    nbytes: int
    used_at: float
    depth: int

    @property
    def coldness(self) -> tuple[int, int, float]:
        """Smaller is colder. Of chunks used at about the same time, a prompt's end is colder than its beginning."""
        return int(self.used_at // BUCKET_S), -self.depth, self.used_at


@dataclass
class _Announcements:
    """The announcements of the living writers of chunks of our size, and the largest of their bounds.

    Writers that have announced nothing count, too: many may begin at once, and each holds a share in advance.
    """

    bound_bytes: int
    nbytes: int = 0
    num_writers: int = 0


@dataclass
class _Listing:
    """`chunks` are those of our size, `others` those of any other size."""

    announced: _Announcements
    chunks: list[_Found] = field(default_factory=list)
    others: list[_Found] = field(default_factory=list)

    @property
    def bytes_over(self) -> int:
        """Bytes present or announced beyond the bound."""
        return sum(found.nbytes for found in self.chunks) + self.announced.nbytes - self.announced.bound_bytes


@dataclass
class RoomCounts:
    """Removals by this process so far."""

    evicted_chunks: int = 0
    expired_chunks: int = 0
    stale_temps: int = 0


class ChunkRoom:
    """This process's share of a folder's bound, and the removal of old files. Thread-safe."""

    def __init__(self, store: ChunkFiles, bound_bytes: int, stale_s: float = STALE_S) -> None:
        """`bound_bytes` is for chunks of the store's file size; another writer's larger bound applies while it lives.

        Raises `OSError`.
        """
        self.bound_bytes = bound_bytes
        self.counts = RoomCounts()
        self._store = store
        self._stale_s = stale_s
        self._pid = os.getpid()
        self._path = str(store.temp / f"{store.owner}-{store.file_bytes}-{bound_bytes}{ROOM_SUFFIX}")
        self._lock = threading.RLock()  # the garbage collector may close it at any point of a thread that has the lock
        self._is_closed = False
        self._in_flight = 0
        self._spare = 0
        self._is_idle = True
        self._num_writers = 1
        self._shown_at = float("-inf")
        try:
            self._publish()
        except OSError:
            give_up_name(store.owner)
            raise

    def reserve(self, nbytes: int, keep: Callable[[], Collection[str]]) -> int:
        """Bytes that may be written now: `nbytes`, or less if the rest of the bound is in use or in `keep`.

        The coldest chunks are removed to make room, but none if that would not suffice. `keep` returns the paths that
        must stay. Give the bytes back with `account_for`. Raises `OSError` if the folder cannot be listed.
        """
        with self._lock:
            self._is_idle = False
            if self._spare < nbytes:
                self._grow(nbytes, keep)
            granted = min(nbytes, self._spare)
            self._spare -= granted
            self._in_flight += granted
            return granted

    def account_for(self, *, written: int, unused: int) -> None:
        """Account for reserved bytes: `written` became chunks, `unused` are given back. Never raises."""
        with self._lock:
            self._in_flight -= written + unused
            self._spare += unused
            with contextlib.suppress(OSError):
                self._publish()

    def beat(self) -> None:
        """Show that this process lives; give back what it has not used since the last call. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path)  # without the lock, whose owner may be listing for long
        with self._lock:
            if self._is_idle:
                self._spare = 0
            self._is_idle = True
            self._publish()

    def expire(self, max_age_s: float) -> int:
        """Remove all chunks unused for this long, and empty folders. Returns how many. Raises `OSError`."""
        with self._lock:
            now = self._now()
        num_expired = 0
        listing = self._list(now)
        for found in itertools.chain(listing.chunks, listing.others):
            self._show_life()
            if now - found.used_at > max_age_s and _remove(found.path):
                num_expired += 1
        self._remove_empty_folders(now)
        self.counts.expired_chunks += num_expired
        return num_expired

    def expire_of(self, paths: Collection[str], max_age_s: float) -> set[str]:
        """Remove those of these files that are unused for this long. Returns the members of `paths` that are gone."""
        with self._lock:
            now = self._now()
        gone = set()
        for path in paths:
            self._show_life()
            try:
                used_at = os.stat(path).st_mtime
            except OSError:
                gone.add(path)
                continue
            if now - used_at > max_age_s and _remove(path):
                gone.add(path)
                self.counts.expired_chunks += 1
        return gone

    def sweep(self) -> None:
        """Remove what dead writers left behind, but no chunks. Raises `OSError`."""
        with self._lock:
            self._list(self._now())

    def trim(self) -> None:
        """Remove what dead writers left behind, and the coldest chunks beyond the bound. Raises `OSError`."""
        with self._lock:
            listing = self._list(self._now())
            self._evict(listing.chunks, listing.bytes_over)

    def close(self) -> None:
        """Give everything back, for good. Never raises. In a forked child, it belongs to the parent and stays.

        Files that cannot be removed now are left without an owner: the next listing that can removes them.
        """
        if os.getpid() == self._pid:
            with self._lock:
                self._is_closed = True
                _remove(self._path)
                give_up_name(self._store.owner)

    def _grow(self, nbytes: int, keep: Callable[[], Collection[str]]) -> None:
        """Announce until `nbytes` are spare or the bound is exhausted. The lock is held."""
        unit = self._store.file_bytes
        announced = self._announcements(self._now())
        self._num_writers = max(1, announced.num_writers)
        nbytes = min(nbytes, announced.bound_bytes)
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(random.uniform(0, _RETRY_S * attempt))
            before = self._spare
            wanted = max(0, nbytes - before)
            extra = self._share(_SPARE_SHARE)
            self._spare = before + wanted + extra
            try:
                self._publish()
                listing = self._list(self._now())
            except BaseException:
                self._spare = before  # no listing has shown room for more
                raise
            over = listing.bytes_over
            if over > extra:
                kept = keep()
                removable = [found for found in listing.chunks if found.path not in kept]
                if over - unit * len(removable) <= wanted + extra - unit:  # otherwise nothing is gained
                    needed = over - extra + min(extra, self._share(_EVICTED_SPARE_SHARE))
                    over -= self._evict(removable, needed)
            excess = min(max(0, -(-over // unit) * unit), wanted + extra)
            self._spare -= excess
            self._publish()
            others = listing.announced.nbytes - self._in_flight - (before + wanted + extra)
            if self._spare >= nbytes or others <= 0:
                return

    def _share(self, of_bound: int) -> int:
        """How much one writer may hold in advance: all together hold a small part of the bound. Whole chunks."""
        unit = self._store.file_bytes
        return min(_MAX_SHARE_BYTES, self.bound_bytes // of_bound // self._num_writers) // unit * unit

    def _evict(self, chunks: Sequence[_Found], nbytes: int) -> int:
        """Remove the coldest of these until `nbytes` are free; returns how many bytes were freed."""
        freed = 0
        if nbytes <= 0:
            return freed
        for found in sorted(chunks, key=lambda found: found.coldness):
            if freed >= nbytes:
                break
            self._show_life()
            if _remove(found.path):
                freed += found.nbytes
                self.counts.evicted_chunks += 1
        return freed

    def _publish(self) -> None:
        """Make our announcement as large as what we hold, with the filesystem's current time. The lock is held."""
        if self._is_closed:
            return
        nbytes = self._in_flight + self._spare
        try:
            os.truncate(self._path, nbytes)
            os.utime(self._path)
        except FileNotFoundError:
            self._store.make_temp_folder()
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)

    def _now(self) -> float:
        """The filesystem's clock. The lock is held."""
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self._publish()
        return os.stat(self._path).st_mtime

    def _show_life(self) -> None:
        """Give a sign of life during long work. Never raises."""
        if time.monotonic() - self._shown_at > BEAT_S:
            self._shown_at = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _list(self, now: float) -> _Listing:
        """List all our files in the folder. Removes what dead writers left behind."""
        # Announcements first: a chunk completed meanwhile then counts twice rather than not at all.
        listing = _Listing(self._announcements(now))
        with os.scandir(self._store.root) as entries:
            folders = [entry.path for entry in entries if is_chunk_folder(entry.name)]
        for folder in folders:
            self._show_life()
            for entry in _entries(folder):
                depth = depth_of(entry.name)
                status = None if depth is None else _status(entry)
                if depth is not None and status is not None:
                    chunks = listing.chunks if status.st_size == self._store.file_bytes else listing.others
                    chunks.append(_Found(entry.path, status.st_size, status.st_mtime, depth))
        self._num_writers = max(1, listing.announced.num_writers)
        return listing

    def _announcements(self, now: float) -> _Announcements:
        """Read the temp folder. Removes what dead writers left behind."""
        announced = _Announcements(self.bound_bytes)
        living = set()
        temps = []
        for entry in _entries(str(self._store.temp)):
            status = _status(entry) if entry.name.endswith((ROOM_SUFFIX, TEMP_SUFFIX)) else None
            if status is None:
                continue
            owner, *numbers = entry.name.removesuffix(ROOM_SUFFIX).split("-")
            if entry.name.endswith(TEMP_SUFFIX):
                temps.append((entry.path, status, owner))
                continue
            if entry.path != self._path and self._is_left_behind(entry.path, status, owner, now):
                continue
            living.add(owner)
            if len(numbers) == 2 and numbers[0] == str(self._store.file_bytes) and numbers[1].isdecimal():
                announced.bound_bytes = max(announced.bound_bytes, int(numbers[1]))
                announced.nbytes += status.st_size
                announced.num_writers += 1
        for path, status, owner in temps:  # part of their owners' announcements
            if owner not in living:
                self._is_left_behind(path, status, owner, now)
        return announced

    def _is_left_behind(self, path: str, status: os.stat_result, owner: str, now: float) -> bool:
        """Whether the owner of a file in the temp folder is dead. If so, the file is removed."""
        is_silent = now - status.st_mtime > self._stale_s and now - _newest_time(path, status) > self._stale_s
        if is_silent or is_surely_dead(owner):
            self.counts.stale_temps += _remove(path)
            return True
        return False

    def _remove_empty_folders(self, now: float) -> None:
        with os.scandir(self._store.root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if is_chunk_folder(entry.name) and now - entry.stat().st_mtime > BUCKET_S:
                        os.rmdir(entry.path)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """A folder's entries; empty if it is not a folder, was just removed or is not accessible."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a plain file, if it still exists."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _newest_time(path: str, status: os.stat_result) -> float:
    """When the file was last written or touched. Opening it makes NFS refresh listings, which may be a minute old."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return status.st_mtime
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _remove(path: str) -> bool:
    """True if we removed it, rather than another process, and no error came in the way."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
