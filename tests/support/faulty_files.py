"""Files that fail on purpose, under a disk store. Everything may be switched while the store is in use. Thread-safe."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.stores.files import Files

ALWAYS = 1 << 60


@dataclass
class _Fault:
    """`after` more calls pass, then `times` fail. A torn one first writes `torn_bytes`."""

    errno: int
    after: int
    times: int
    torn_bytes: int


class FaultyFiles(Files):
    """The operating system's files, until a fault is set. Operations have their names in `Files`.

    `delay_s` slows down every read and write. With `refuses_direct`, the filesystem has no direct I/O. `before_write`
    is called with the data and offset of every write before it is made. `num_calls` counts operations.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.refuses_direct = False
        self.before_write: Callable[[memoryview, int], object] | None = None
        self.num_calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._faults: dict[str, _Fault] = {}

    def fail(self, operation: str, errno: int, *, after: int = 0, times: int = ALWAYS) -> None:
        """Let `after` calls pass and make the next `times` raise `errno`, before they do anything."""
        with self._lock:
            self._faults[operation] = _Fault(errno, after, times, 0)

    def tear(self, num_bytes: int, errno: int, *, after: int = 0) -> None:
        """Let `after` writes pass; of the next only the first `num_bytes` arrive, and it raises."""
        with self._lock:
            self._faults["write"] = _Fault(errno, after, 1, num_bytes)

    def heal(self) -> None:
        """Everything works again."""
        with self._lock:
            self._faults.clear()
        self.delay_s = 0.0
        self.refuses_direct = False
        self.before_write = None

    def open(self, path: Path, flags: int) -> int:
        self._check("open")
        if self.refuses_direct and flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return super().open(path, flags)

    def write(self, fd: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
        if self.before_write is not None:
            self.before_write(memoryview(b"".join(parts)), offset)
        if self.delay_s:
            time.sleep(self.delay_s)
        fault = self._next_fault("write")
        if fault is not None:
            _write_buffered(fd, b"".join(parts)[: fault.torn_bytes], offset)
            raise _error(fault)
        super().write(fd, parts, offset)

    def read_into(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if self.delay_s:
            time.sleep(self.delay_s)
        self._check("read_into")
        return super().read_into(fd, parts, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._check("allocate")
        super().allocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._check("truncate")
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)

    def _check(self, operation: str) -> None:
        fault = self._next_fault(operation)
        if fault is not None:
            raise _error(fault)

    def _next_fault(self, operation: str) -> _Fault | None:
        """The fault of this call, if it has one."""
        with self._lock:
            self.num_calls[operation] += 1
            fault = self._faults.get(operation)
            if fault is None:
                return None
            if fault.after:
                fault.after -= 1
                return None
            fault.times -= 1
            if not fault.times:
                del self._faults[operation]
            return fault


def _write_buffered(fd: int, data: bytes, offset: int) -> None:
    """Any number of bytes, also into a file that was opened for direct I/O."""
    buffered = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(buffered, data, offset)
    finally:
        os.close(buffered)


def _error(fault: _Fault) -> OSError:
    return OSError(fault.errno, os.strerror(fault.errno))
