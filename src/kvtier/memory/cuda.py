"""CUDA's runtime through ctypes: many copies in one call, and arenas with locked pages that the device reads and writes
itself.

It uses the runtime that another library of this process, such as torch, has loaded. Streams are raw handles. Every call
releases the GIL and may be made from any thread that has its device set.

While a thread captures a CUDA graph, potentially unsafe calls of other threads, such as registering memory, fail and
break the capture, unless their thread is in relaxed mode: `Cudart.relaxed`. No call made here in that mode depends on
captured work, or is captured itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.errors import TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.sizes import format_size

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""While a piece is registered, every other CUDA call waits: for 4 ms with this size, for 47 ms with a GiB."""

_MAJORS = (13, 12)
_FIRST_WITHOUT_FAIL_INDEX = 13000
_NOT_SUPPORTED = 801
_NEEDS_NEWER_DRIVER = 36
_REGISTER_PORTABLE = 1
_CAPTURE_MODE_RELAXED = 2
_SOURCE_IN_STREAM_ORDER = 1
_SOURCE_ANY_TIME = 3


class CopyDirection(enum.Enum):
    """The direction of copies. The value is CUDA's `cudaMemcpyKind`."""

    TO_DEVICE = 1
    TO_HOST = 2


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Entry `i` copies `sizes[i]` bytes between `device[i]` and `host[i]`, which are addresses."""

    device: array[int]
    host: array[int]
    sizes: array[int]

    @classmethod
    def of(cls, device: Sequence[int], host: Sequence[int], sizes: Sequence[int]) -> CopyBatch:
        return cls(array("Q", device), array("Q", host), array("Q", sizes))


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `nbytes`, dense from the address `device` on, and `host_pitch_bytes` apart from `host` on."""

    device: int
    host: int
    nbytes: int
    count: int
    host_pitch_bytes: int


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


# Sources on the host are complete before a copy is requested; sources on the device, when the stream gets there.
_ATTRIBUTES = {
    CopyDirection.TO_DEVICE: _CopyAttributes(source_order=_SOURCE_ANY_TIME),
    CopyDirection.TO_HOST: _CopyAttributes(source_order=_SOURCE_IN_STREAM_ORDER),
}
_FROM_THE_FIRST = array("Q", [0])


def load_cudart(majors: Sequence[int] = _MAJORS) -> Cudart:
    """The CUDA runtime that this process has loaded, in one of these versions. Raises `TierUnavailable` without one."""
    for major in majors:
        try:
            return Cudart(ctypes.CDLL(f"libcudart.so.{major}", os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError:
            continue
    raise TierUnavailable(f"no CUDA runtime of version {' or '.join(map(str, majors))} is loaded in this process")


class Cudart:
    """The CUDA calls that copies need. Each raises `TierUnavailable`, with CUDA's own words, if it fails."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        library.cudaMemcpyAsync.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        library.cudaMemcpy2DAsync.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t) * 2,
            *(ctypes.c_size_t,) * 2,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        version = ctypes.c_int()
        self._check(library.cudaRuntimeGetVersion(ctypes.pointer(version)), "cannot tell CUDA's version")
        self._has_fail_index = version.value < _FIRST_WITHOUT_FAIL_INDEX
        self._can_batch = hasattr(library, "cudaMemcpyBatchAsync")
        if self._can_batch:
            library.cudaMemcpyBatchAsync.argtypes = (
                *(ctypes.c_void_p,) * 3,
                ctypes.c_size_t,
                *(ctypes.c_void_p,) * 2,
                ctypes.c_size_t,
                *(ctypes.c_void_p,) * (2 if self._has_fail_index else 1),
            )

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """In this scope, calls of this thread can neither fail nor disturb another thread's graph capture."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._exchange_capture_mode(mode)
        try:
            yield
        finally:
            self._exchange_capture_mode(mode)

    def set_device(self, device: int) -> None:
        """Set the device of the calling thread, from now on."""
        with self.relaxed():
            self._check(self._library.cudaSetDevice(device), f"cannot use GPU {device}")

    def copy(self, copies: CopyBatch, direction: CopyDirection, stream: int) -> None:
        """Begin copies from or to registered memory, in the order of `stream`, which is not the legacy one."""
        if self._can_batch and self._copy_batch(copies, direction, stream):
            return
        self.copy_each(copies, direction, stream)

    def copy_each(self, copies: CopyBatch, direction: CopyDirection, stream: int) -> None:
        """Like `copy`, with a call per entry. Takes any memory: if it is not registered, a call waits for its copy."""
        copy_one, kind = self._library.cudaMemcpyAsync, direction.value
        sides = (copies.device, copies.host) if direction is CopyDirection.TO_DEVICE else (copies.host, copies.device)
        for destination, source, nbytes in zip(*sides, copies.sizes, strict=True):
            status = copy_one(destination, source, nbytes, kind, stream)
            if status:
                self._check(status, f"a copy of {nbytes} bytes failed")

    def copy_rows(self, rows: Rows, direction: CopyDirection, stream: int) -> None:
        """Begin one copy from or to registered memory."""
        sides = ((rows.device, rows.nbytes), (rows.host, rows.host_pitch_bytes))
        target, source = sides if direction is CopyDirection.TO_DEVICE else sides[::-1]
        status = self._library.cudaMemcpy2DAsync(*target, *source, rows.nbytes, rows.count, direction.value, stream)
        self._check(status, f"a copy of {rows.count} x {rows.nbytes} bytes failed")

    def register(self, address: int, nbytes: int) -> None:
        """Lock the pages of a range, for every device of this process."""
        with self.relaxed():
            status = self._library.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE)
            self._check(status, f"cannot register {format_size(nbytes)} of memory")

    def unregister(self, address: int) -> None:
        with self.relaxed():
            self._check(self._library.cudaHostUnregister(address), "cannot unregister memory")

    def _copy_batch(self, copies: CopyBatch, direction: CopyDirection, stream: int) -> bool:
        """False if the runtime refuses. Copies that it has begun may be repeated: the bytes are the same."""
        device, host = copies.device.buffer_info()[0], copies.host.buffer_info()[0]
        sizes, count = copies.sizes.buffer_info()
        failed_at = ctypes.c_size_t()
        status = self._library.cudaMemcpyBatchAsync(
            *((device, host) if direction is CopyDirection.TO_DEVICE else (host, device)),
            sizes,
            count,
            ctypes.addressof(_ATTRIBUTES[direction]),
            _FROM_THE_FIRST.buffer_info()[0],
            1,
            *((ctypes.addressof(failed_at), stream) if self._has_fail_index else (stream,)),
        )
        if not status:
            return True
        message = self._take_error(status)
        if status in (_NOT_SUPPORTED, _NEEDS_NEWER_DRIVER):
            self._can_batch = False
            logger.warning("copies are made one by one: CUDA cannot batch them here: %s", message)
        return False

    def _exchange_capture_mode(self, mode: ctypes.c_int) -> None:
        """Sets the calling thread's mode to `mode`, which then holds the previous one."""
        status = self._library.cudaThreadExchangeStreamCaptureMode(ctypes.pointer(mode))
        self._check(status, "cannot change this thread's mode for graph captures")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise TierUnavailable(f"{what}: {self._take_error(status)}")

    def _take_error(self, status: int) -> str:
        """CUDA's words for `status`. The error is cleared, or torch would find it at its next call."""
        self._library.cudaGetLastError()
        text: bytes = self._library.cudaGetErrorString(status)
        return f"{text.decode()} ({status})"


def cut(device: Sequence[int], offsets: Sequence[int], nbytes: int, piece_bytes: int) -> list[tuple[int, int, int]]:
    """`nbytes` at each device address and offset, as (address, offset, size), none of which crosses two pieces."""
    entries = []
    for address, offset in zip(device, offsets, strict=True):
        for part_offset, part_bytes in pieces_of(offset, nbytes, piece_bytes):
            entries.append((address + part_offset - offset, part_offset, part_bytes))
    return entries


def pieces_of(offset: int, nbytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """The range as (offset, size) of parts, each within one piece."""
    parts = []
    end = offset + nbytes
    while offset < end:
        part_end = min(end, (offset // piece_bytes + 1) * piece_bytes)
        parts.append((offset, part_end - offset))
        offset = part_end
    return parts


class Registration:
    """An arena that a thread of its own registers with CUDA, piece by piece.

    A copy may touch only one piece, whether that is registered yet or not. The arena stays mapped until `close`: its
    own `close` raises `LeaseError`. The thread has only a weak reference to it: the adopter watches for its end.
    A piece that cannot be registered is logged; it and all later pieces stay unregistered.
    """

    def __init__(self, arena: MappedArena, cudart: Cudart, device: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Raises `LeaseError` if the arena is closed."""
        assert piece_bytes % os.sysconf("SC_PAGESIZE") == 0, "a page has one registration"
        self.piece_bytes = piece_bytes
        with arena.in_use():
            self._mapping = arena.view(0, arena.nbytes)
        self._address = arena.address
        self._nbytes = arena.nbytes
        self._cudart = cudart
        self._device = device
        self._is_registered = bytearray(-(-arena.nbytes // piece_bytes))
        self._is_stopping = False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(weakref.ref(arena),), name="kvtier-register", daemon=True
        )
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Whether every piece is registered."""
        return 0 not in self._is_registered

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether the whole range is registered now."""
        first, last = offset // self.piece_bytes, (offset + nbytes - 1) // self.piece_bytes
        return self._is_registered.find(0, first, last + 1) < 0

    def pieces_of(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The range as (offset, size) of parts that a single copy each may touch."""
        return pieces_of(offset, nbytes, self.piece_bytes)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the thread is done with the arena. Returns whether all of it is registered."""
        self._thread.join(timeout_s)
        return self.is_complete

    def close(self) -> None:
        """Finish the piece in progress, unregister all pieces, and release the mapping. Safe to call twice.

        No copy may be in flight, and none may begin. The calling thread must have its device set.
        """
        self._is_stopping = True
        self._thread.join()
        with self._close_lock:
            for number, is_registered in enumerate(self._is_registered):
                if is_registered:
                    self._is_registered[number] = 0
                    try:
                        self._cudart.unregister(self._address + number * self.piece_bytes)
                    except TierUnavailable as error:
                        logger.warning("memory stays registered: %s", error)
            self._mapping.release()

    def _run(self, arena: weakref.ref[MappedArena]) -> None:
        try:
            self._cudart.set_device(self._device)
            for number in range(len(self._is_registered)):
                start = number * self.piece_bytes
                length = min(self.piece_bytes, self._nbytes - start)
                mapped = arena()
                if self._is_stopping or mapped is None:
                    return
                # Otherwise the pages are allocated and cleared inside the call, while the device's other callers wait.
                mapped.populate(start, length)
                del mapped
                self._cudart.register(self._address + start, length)
                self._is_registered[number] = 1
            logger.info("all of %s is registered with CUDA", format_size(self._nbytes))
        except TierUnavailable as error:
            logger.warning(
                "copies go through unregistered memory from byte %d of %d: %s",
                self.piece_bytes * sum(self._is_registered),
                self._nbytes,
                error,
            )
