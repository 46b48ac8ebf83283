"""Files of a machine whose power may be cut: what was not synced may be lost, sector by sector. Thread-safe."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.stores.files import Files

_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Unsynced:
    """The content of a file before a write."""

    path: str
    offset: int
    before: bytes


class PowerCutFiles(Files):
    """The operating system's files; `cut` undoes a random part of what was written and not synced since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsynced: list[_Unsynced] = []

    def write(self, fd: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        with self._lock:
            with open(path, "rb") as file:
                file.seek(offset)
                before = file.read(sum(map(len, parts)))
            super().write(fd, parts, offset)
            self._unsynced.append(_Unsynced(path, offset, before))

    def sync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        super().sync(fd)
        with self._lock:
            self._unsynced = [write for write in self._unsynced if write.path != path]

    def cut(self, rng: random.Random) -> int:
        """Lose some sectors, and forget what could be lost. Returns how many sectors went back."""
        num_lost = 0
        with self._lock:
            for write in reversed(self._unsynced):
                with open(write.path, "r+b") as file:
                    for first in range(0, len(write.before), _SECTOR_BYTES):
                        if rng.random() < 0.5:
                            file.seek(write.offset + first)
                            file.write(write.before[first : first + _SECTOR_BYTES])
                            num_lost += 1
            self._unsynced.clear()
        return num_lost
