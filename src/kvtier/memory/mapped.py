"""A mapped arena: one range of memory behind a memfd that several processes can map.

The owner creates it and passes on its descriptor; all processes that map it read and write the same pages. Pages cost
nothing until they are touched. The size and the seals themselves are sealed, so that no process can shrink the arena
while another uses it, or keep others from mapping it. Core dumps leave it out: it is as secret as the prompts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

from kvtier.errors import ConfigError, LeaseError, RemoteProtocolError
from kvtier.memory.huge_pages import HUGE_BYTES, MADV_POPULATE_WRITE, HugePages
from kvtier.sizes import format_size

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS = _SIZE_SEALS | fcntl.F_SEAL_SEAL
_POPULATE_STEP_BYTES = HUGE_BYTES
_NUM_POPULATE_LOCKS = 16
"""Pieces are spread over this many locks, so that a caller does not wait while another thread populates the arena."""
_NO_FD = -1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedArena:
    """`nbytes` of shared memory. Thread-safe. Views keep it mapped: `close` with views in use raises `LeaseError`.

    `inode` is the same in every process that maps it, and differs from every other arena of this host.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `fd`, which this object owns from now on."""
        self.fd = fd
        self.nbytes = nbytes
        self.inode = os.fstat(fd).st_ino
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor
        self._populated = bytearray(-(-nbytes // _POPULATE_STEP_BYTES))
        self._populate_locks = [threading.Lock() for _ in range(_NUM_POPULATE_LOCKS)]
        self._huge_pages: HugePages | None = None
        with contextlib.suppress(OSError):  # where the address space is limited
            self._huge_pages = HugePages(fd, nbytes)
        self._can_populate = True
        self._idle = threading.Condition()
        self._num_copies = 0
        self._is_closed = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the mapping while bytes are copied by address. Raises `LeaseError` once the arena is closed."""
        with self._idle:
            if self._is_closed:
                raise LeaseError("the client of this memory is closed")
            self._num_copies += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_copies -= 1
                self._idle.notify_all()

    def stop_use(self, timeout_s: float) -> bool:
        """Allow no more copies and wait for those in flight. False if some are not done in time."""
        with self._idle:
            self._is_closed = True
            return self._idle.wait_for(lambda: not self._num_copies, timeout_s)

    @classmethod
    def create(cls, nbytes: int) -> MappedArena:
        """A new arena, all zeros, none of it resident."""
        if nbytes <= 0:
            raise ConfigError(f"cannot map an arena of {nbytes} bytes")
        fd = os.memfd_create("kvtier-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, nbytes)
        except (OSError, OverflowError) as error:
            os.close(fd)
            why = error.strerror if isinstance(error, OSError) else "that is more than any machine has"
            raise ConfigError(f"cannot map an arena of {format_size(nbytes)}: {why}") from error

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> MappedArena:
        """Map another process's arena from its descriptor, which this takes over and closes.

        Raises `RemoteProtocolError` unless the descriptor is an arena of `nbytes` whose size is sealed.
        """
        try:
            if nbytes <= 0:
                raise RemoteProtocolError("the peer passed an arena of no size")
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SIZE_SEALS != _SIZE_SEALS or os.fstat(fd).st_size != nbytes:
                raise RemoteProtocolError("the peer passed a descriptor that is no sealed arena of the announced size")
            arena = cls(fd, nbytes)
        except OSError as error:
            raise RemoteProtocolError(f"the peer's arena cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)  # the mapping has a descriptor of its own
        arena.fd = _NO_FD
        return arena

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of `nbytes` at `offset`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise LeaseError(f"bytes {offset}..{offset + nbytes} are outside the arena of {self.nbytes}")
        return self._view[offset : offset + nbytes]

    def exports(self, offsets: Sequence[int], nbytes: int) -> list[ctypes.Array[ctypes.c_ubyte]]:
        """`nbytes` at each offset as a separate object: its views keep it alive, and it keeps the mapping."""
        kind = ctypes.c_ubyte * nbytes
        return [kind.from_buffer(self._map, offset) for offset in offsets]

    def populate(self, offset: int, nbytes: int) -> None:
        """Make the pages of a range present and writable in this process, in one call instead of a fault a page.

        Each 2 MiB is then contiguous if the kernel has such memory, which disks read and write faster. A later call
        for the same range costs nothing. A hint: if the kernel cannot do it, pages still fault one by one, as do pages
        that another process joins afterwards.
        """
        number = offset // _POPULATE_STEP_BYTES
        end = -(-(offset + nbytes) // _POPULATE_STEP_BYTES)
        while self._can_populate and (number := self._populated.find(0, number, end)) >= 0:
            with self._populate_locks[number % _NUM_POPULATE_LOCKS]:
                if not self._populated[number] and not self._populate(number):
                    return

    def _populate(self, number: int) -> bool:
        start = number * _POPULATE_STEP_BYTES
        length = min(_POPULATE_STEP_BYTES, self.nbytes - start)
        if self._huge_pages is not None:
            self._huge_pages.join(start, length)
        if _libc.madvise(self.address + start, length, MADV_POPULATE_WRITE) != 0:
            self._can_populate = ctypes.get_errno() != errno.EINVAL
            return False
        self._populated[number] = 1
        return True

    def close(self) -> None:
        """Close the descriptor and unmap. While views are in use, raises `LeaseError`, and the mapping stays."""
        if self.fd != _NO_FD:
            os.close(self.fd)
            self.fd = _NO_FD
        if not self.stop_use(0):
            raise LeaseError("the arena is still in use: a copy is in flight")
        try:
            self._view.release()
            self._map.close()
            with contextlib.ExitStack() as stack:
                for lock in self._populate_locks:
                    stack.enter_context(lock)
                if self._huge_pages is not None:
                    self._huge_pages.close()
        except BufferError as error:
            raise LeaseError("the arena is still in use: release its views first") from error
