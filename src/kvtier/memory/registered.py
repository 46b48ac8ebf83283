"""The arenas that one device copies from and to, registered with CUDA in the background, and the copies themselves.

Uses no torch: streams are raw handles. Any thread that has its device set may call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.memory.cuda import PIECE_BYTES, CopyBatch, CopyDirection, Cudart, Registration, Rows, cut
from kvtier.memory.mapped import MappedArena


class RegisteredArenas:
    """Thread-safe. An arena is released with its last other reference, or when this closes."""

    def __init__(
        self,
        cudart: Cudart,
        device: int,
        slot_bytes: int,
        forgotten: Callable[[Registration], object],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """The garbage collector calls `forgotten`: it may only leave a note for a thread that then calls `end`."""
        self._cudart = cudart
        self._device = device
        # A multiple of the slot size, so that no slot crosses two pieces.
        self.piece_bytes = max(1, piece_bytes // slot_bytes) * slot_bytes
        self._forgotten = forgotten
        self._lock = threading.Lock()
        self._is_closed = False
        self._adopted: weakref.WeakKeyDictionary[MappedArena, Registration] = weakref.WeakKeyDictionary()
        self._registrations: set[Registration] = set()

    def adopt(self, arena: MappedArena) -> None:
        """Register an arena in the background. A second call does nothing."""
        with self._lock:
            if self._is_closed or arena in self._adopted:
                return
            registration = Registration(arena, self._cudart, self._device, self.piece_bytes)
            self._adopted[arena] = registration
            self._registrations.add(registration)
        # Every copy refers to its arena: without references no copy is in flight.
        weakref.finalize(arena, self._forgotten, registration).atexit = False

    def registration(self, arena: MappedArena) -> Registration | None:
        """The registration that `adopt` began."""
        with self._lock:
            return self._adopted.get(arena)

    def has(self, registration: Registration) -> bool:
        """Whether the registration is still in place."""
        with self._lock:
            return registration in self._registrations

    def end(self, registration: Registration) -> None:
        """End the registration of an arena that no longer exists."""
        registration.close()
        with self._lock:
            self._registrations.discard(registration)

    def close(self) -> None:
        """End all registrations. No copy may be in flight, and none may begin."""
        with self._lock:
            self._is_closed = True
            registrations, self._registrations = self._registrations, set()
        for registration in registrations:
            registration.close()

    def copy(
        self,
        device: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        nbytes: int,
        direction: CopyDirection,
        stream: int,
    ) -> None:
        """Begin to copy `nbytes` at each device address and offset. If the memory is not registered, this waits.

        The caller keeps the arena in use until the stream is done. Raises `TierUnavailable`.
        """
        fast, slow = by_speed(device, offsets, nbytes, arena.address, self.piece_bytes, self.registration(arena))
        if fast.sizes:
            self._cudart.copy(fast, direction, stream)
        if slow.sizes:
            if direction is CopyDirection.TO_HOST:
                for offset in offsets:
                    arena.populate(offset, nbytes)
            self._cudart.copy_each(slow, direction, stream)

    def copy_rows(
        self,
        device: Sequence[int],
        arena: MappedArena,
        offsets: Sequence[int],
        rows: RowShape,
        direction: CopyDirection,
        stream: int,
    ) -> None:
        """Like `copy`, for rows that are dense at each device address and `rows.pitch_bytes` apart at each offset."""
        registration = self.registration(arena)
        for address, offset, count in _joined(device, offsets, rows, self.piece_bytes):
            nbytes = (count - 1) * rows.pitch_bytes + rows.nbytes
            if (
                registration is not None
                and registration.covers(offset, nbytes)
                and self._is_in_one_piece(offset, nbytes)
            ):
                many = Rows(address, arena.address + offset, rows.nbytes, count, rows.pitch_bytes)
                self._cudart.copy_rows(many, direction, stream)
            else:
                each = [address + number * rows.nbytes for number in range(count)]
                places = [offset + number * rows.pitch_bytes for number in range(count)]
                self.copy(each, arena, places, rows.nbytes, direction, stream)

    def _is_in_one_piece(self, offset: int, nbytes: int) -> bool:
        return offset % self.piece_bytes + nbytes <= self.piece_bytes


@dataclass(frozen=True, slots=True)
class RowShape:
    """`count` rows of `nbytes`, in an arena `pitch_bytes` apart."""

    nbytes: int
    count: int
    pitch_bytes: int


def _joined(
    device: Sequence[int], offsets: Sequence[int], rows: RowShape, piece_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """(address, offset, number of rows), with adjacent entries in the same piece joined into one."""
    address, offset, count = 0, 0, 0
    for next_address, next_offset in zip(device, offsets, strict=True):
        is_next = next_address == address + count * rows.nbytes and next_offset == offset + count * rows.pitch_bytes
        if count and is_next and next_offset // piece_bytes == offset // piece_bytes:
            count += rows.count
        else:
            if count:
                yield address, offset, count
            address, offset, count = next_address, next_offset, rows.count
    if count:
        yield address, offset, count


def by_speed(
    device: Sequence[int],
    offsets: Sequence[int],
    nbytes: int,
    arena_address: int,
    piece_bytes: int,
    registration: Registration | None,
) -> tuple[CopyBatch, CopyBatch]:
    """`nbytes` at each device address and offset, as copies to or from registered host memory, and the other copies.

    No copy straddles two pieces, even of an unregistered arena: its registration may begin while the copies run.
    """
    is_whole = all(offset % piece_bytes + nbytes <= piece_bytes for offset in offsets)
    if is_whole and registration is not None and registration.is_complete:
        return CopyBatch.of(device, [arena_address + offset for offset in offsets], [nbytes] * len(offsets)), _NOTHING
    fast: list[tuple[int, int, int]] = []
    slow: list[tuple[int, int, int]] = []
    for entry in cut(device, offsets, nbytes, piece_bytes):
        is_registered = registration is not None and registration.covers(entry[1], entry[2])
        (fast if is_registered else slow).append(entry)
    return _copies(fast, arena_address), _copies(slow, arena_address)


def _copies(entries: Sequence[tuple[int, int, int]], arena_address: int) -> CopyBatch:
    device, offsets, sizes = zip(*entries, strict=True) if entries else ((), (), ())
    return CopyBatch.of(device, [arena_address + offset for offset in offsets], sizes)


_NOTHING = CopyBatch.of([], [], [])
