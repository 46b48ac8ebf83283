"""`blocks.kvtier`: the blocks' bytes in units of 4 KiB, moved by direct I/O if the filesystem has it. Thread-safe.

Owns only the file: the store decides what lies where.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.memory.copying import address_of
from kvtier.stores.files import Files, is_file_of
from kvtier.stores.records import UNIT_BYTES

logger = logging.getLogger(__name__)

PAYLOADS_NAME = "blocks.kvtier"


class PayloadFile:
    """A slot is a block's bytes rounded up to whole units; blocks are passed as slots or as bare payloads.

    A slot of aligned memory moves without a copy, and adjacent slots in the file move in one call.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self._files = files
        self._staging: deque[mmap.mmap] = deque()
        try:
            self._fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            self._is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.warning("disk store %s: this filesystem has no direct I/O; using buffered I/O", path.parent)
            self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
            self._is_direct = False

    @property
    def nbytes(self) -> int:
        return self._files.size(self._fd)

    def write(self, starts: Sequence[int], payloads: Sequence[memoryview], block_bytes: int, slot_bytes: int) -> None:
        """Write blocks at units `starts`."""
        if self._are_slots(payloads, slot_bytes):
            for first, end in _runs(starts, slot_bytes // UNIT_BYTES):
                self._files.write(self._fd, payloads[first:end], starts[first] * UNIT_BYTES)
            return
        for start, payload in zip(starts, payloads, strict=True):
            with self._staged(slot_bytes) as slot:
                slot[:block_bytes] = payload[:block_bytes]
                self._files.write(self._fd, [slot], start * UNIT_BYTES)

    def read(self, starts: Sequence[int], into: Sequence[memoryview], block_bytes: int, slot_bytes: int) -> None:
        """Fill `into` with the blocks at units `starts`. Raises `OSError`, also if the file ends before they do."""
        if self._are_slots(into, slot_bytes):
            for first, end in _runs(starts, slot_bytes // UNIT_BYTES):
                length = self._files.read_into(self._fd, into[first:end], starts[first] * UNIT_BYTES)
                _check_length(length, (end - first - 1) * slot_bytes + block_bytes)
            return
        for start, view in zip(starts, into, strict=True):
            with self._staged(slot_bytes) as slot:
                _check_length(self._files.read_into(self._fd, [slot], start * UNIT_BYTES), block_bytes)
                view[:block_bytes] = slot[:block_bytes]

    def allocate(self, offset: int, nbytes: int) -> None:
        self._files.allocate(self._fd, offset, nbytes)

    def cut(self, nbytes: int) -> None:
        self._files.truncate(self._fd, nbytes)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def is_in_place(self) -> bool:
        """Whether the open file is still the one in the folder."""
        return is_file_of(self._fd, self.path)

    def close(self) -> None:
        self._files.close(self._fd)

    def _are_slots(self, views: Sequence[memoryview], slot_bytes: int) -> bool:
        """Whether they can move without a copy."""
        if any(len(view) != slot_bytes for view in views):
            return False
        return not self._is_direct or all(address_of(view) % UNIT_BYTES == 0 for view in views)

    @contextlib.contextmanager
    def _staged(self, slot_bytes: int) -> Iterator[memoryview]:
        """Aligned memory of a slot's size."""
        try:
            memory = self._staging.popleft()
        except IndexError:
            memory = mmap.mmap(-1, slot_bytes)
        if len(memory) < slot_bytes:
            memory.close()
            memory = mmap.mmap(-1, slot_bytes)
        with memoryview(memory) as whole, whole[:slot_bytes] as slot:
            yield slot
        self._staging.append(memory)


def _runs(starts: Sequence[int], units: int) -> Iterator[tuple[int, int]]:
    """Ranges of blocks that are adjacent in the file."""
    first = 0
    for end in range(1, len(starts) + 1):
        if end == len(starts) or starts[end] != starts[end - 1] + units:
            yield first, end
            first = end


def _check_length(length: int, wanted: int) -> None:
    if length < wanted:
        raise OSError(errno.EIO, "the file ends inside the block")
