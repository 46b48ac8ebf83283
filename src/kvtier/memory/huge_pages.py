"""Huge pages for shared memory, independent of the system's settings for them.

Memory that became resident page by page, from several threads or after other programs have come and gone, is scattered
over the machine. A disk then moves each 4 KiB of a direct read separately, which is 40% slower than into contiguous
memory. `MADV_COLLAPSE` (Linux 6.1) makes 2 MiB contiguous; it needs no permission, but a mapping that is aligned like
the file. The bytes do not change, even if they are read or written meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
import time
import weakref
from collections.abc import Callable

HUGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23

_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_REST_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HugePages:
    """A second mapping of a memfd of `nbytes`, used only for joining pages.

    It maps pages only for a moment, so they do not count twice as memory of this process. Several threads may join
    different pieces, but not during `close`.
    """

    def __init__(self, fd: int, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `OSError` if the address space has no room or is limited: others may need the rest of it."""
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError(errno.ENOMEM, "the address space is limited")
        self._clock = clock
        self._rests_until = 0.0
        self._nbytes = nbytes // HUGE_BYTES * HUGE_BYTES
        self._can_join = self._nbytes > 0
        room = self._nbytes + HUGE_BYTES
        start = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._unmap = weakref.finalize(self, _libc.munmap, start, room)
        self._unmap.atexit = False
        self._address = -(-start // HUGE_BYTES) * HUGE_BYTES
        if self._can_join:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            try:
                _map(self._address, self._nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd)
                _libc.madvise(self._address, self._nbytes, mmap.MADV_DONTDUMP)
            except OSError:
                self._unmap.detach()  # another mapping may have the range by now
                raise

    def close(self) -> None:
        """Release the address space. Later calls of `join` do nothing."""
        self._can_join = False
        self._unmap()

    def join(self, first: int, nbytes: int) -> None:
        """Make each 2 MiB of a range contiguous, resident or not so far. A hint: pages in use stay as they are.

        The range begins at a multiple of 2 MiB; a partial 2 MiB at its end stays as it is, too.
        """
        assert first % HUGE_BYTES == 0
        nbytes = min(nbytes, self._nbytes - first) // HUGE_BYTES * HUGE_BYTES
        if not self._can_join or nbytes <= 0 or self._clock() < self._rests_until:
            return
        start = self._address + first
        for page in range(start, start + nbytes, HUGE_BYTES):  # the kernel does not join empty pages
            if _libc.madvise(page, mmap.PAGESIZE, MADV_POPULATE_WRITE) != 0:
                self._can_join = ctypes.get_errno() != errno.EINVAL
                return
        if _libc.madvise(start, nbytes, _MADV_COLLAPSE) != 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # the kernel is too old or was built without it
                self._can_join = False
            elif number != errno.EAGAIN:  # EAGAIN: the pages were in use. Otherwise no contiguous memory is free
                self._rests_until = self._clock() + _REST_S
        _libc.madvise(start, nbytes, mmap.MADV_DONTNEED)


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, access, flags, fd, 0)
    if found in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, "no room in the address space")
    assert isinstance(found, int)
    return found
