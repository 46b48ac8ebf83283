"""The few file operations a store needs, behind one small class, so that tests can make any of them fail."""

from __future__ import annotations

import os
from pathlib import Path


class Files:
    """The operating system's files. Every method raises `OSError`; reads and writes are whole or raise."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill `into`; returns how much there was, less only at the end of the file."""
        total = 0
        while total < len(into):
            received = os.preadv(fd, [into[total:]], offset + total)
            if not received:
                break
            total += received
        return total

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Make room on disk now, so that later writes into it cannot find the disk full."""
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size
