"""The few file operations a store needs, behind one small class, so that tests can make each of them fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

_MAX_PARTS = os.sysconf("SC_IOV_MAX")


class BlockCipher(Protocol):
    """See `stores/cipher`, which needs a library that other parts do without."""

    key_check: bytes

    def staged(self, slot_bytes: int) -> AbstractContextManager[memoryview]: ...

    def seal(self, about: bytes, payload: memoryview, staging: memoryview, slot_bytes: int) -> bytes: ...

    def open(self, seal: bytes, about: bytes, staging: memoryview, into: memoryview) -> None: ...

    def masked(self, checksum: int, seal: bytes) -> int: ...


class NotAuthentic(Exception):
    """A ciphertext was made with another key, for another block, or not at all."""


class Files:
    """The operating system's files. Every method raises `OSError`; reads and writes are whole or raise. Thread-safe.

    A store on them seals its blocks with `cipher`.
    """

    cipher: BlockCipher | None = None

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
        """Write `parts` one after another from `offset` on."""
        for first in range(0, len(parts), _MAX_PARTS):
            left: Sequence[memoryview | bytes] = parts[first : first + _MAX_PARTS]
            while left:
                written = os.pwritev(fd, left, offset)
                left, offset = _without(left, written), offset + written

    def read_into(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """Fill `parts` one after another; returns the number of bytes read, less only at the end of the file."""
        total = 0
        for first in range(0, len(parts), _MAX_PARTS):
            left: Sequence[memoryview | bytes] = parts[first : first + _MAX_PARTS]
            while left:
                received = os.preadv(fd, left, offset + total)
                if not received:
                    return total
                total += received
                left = _without(left, received)
        return total

    def next_data(self, fd: int, offset: int) -> int:
        """The first offset from `offset` on that is not in a hole; beyond the file if there is none."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return max(offset, self.size(fd))
            raise

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve room on disk now, so that later writes into it cannot find the disk full."""
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size


def is_file_of(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        there, ours = os.stat(path), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _without(parts: Sequence[memoryview | bytes], nbytes: int) -> Sequence[memoryview | bytes]:
    """The rest of `parts` after their first `nbytes`."""
    for position, part in enumerate(parts):
        if nbytes < len(part):
            return [memoryview(part)[nbytes:], *parts[position + 1 :]]
        nbytes -= len(part)
    return ()
