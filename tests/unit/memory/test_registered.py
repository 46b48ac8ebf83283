"""Arenas that are registered for a device's copies: which copies are fast, rows, and arenas that nobody needs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue

import pytest

from kvtier.memory.copying import address_of
from kvtier.memory.cuda import CopyBatch, CopyDirection, Cudart, Registration
from kvtier.memory.mapped import MappedArena
from kvtier.memory.registered import RegisteredArenas, RowShape, by_speed
from tests.support.fake_cudart import FakeLibrary
from tests.support.waiting import LIMIT_S

PIECE_BYTES = 1 << 20
SLOT_BYTES = 4096


class Stand:
    """A runtime that is the host, and what it registers."""

    def __init__(self) -> None:
        self.library = FakeLibrary()
        self.forgotten: queue.SimpleQueue[Registration] = queue.SimpleQueue()
        self.arenas = RegisteredArenas(Cudart(self.library), 0, SLOT_BYTES, self.forgotten.put, PIECE_BYTES)

    def register(self, arena: MappedArena) -> Registration:
        self.arenas.adopt(arena)
        registration = self.arenas.registration(arena)
        assert registration is not None
        registration.wait(LIMIT_S)
        return registration


def test_copies_are_fast_as_far_as_memory_is_registered_and_cut_at_pieces() -> None:
    library = FakeLibrary()
    library.max_registered_pieces = 1
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena:
        registration = Registration(arena, Cudart(library), 0, PIECE_BYTES)
        registration.wait(LIMIT_S)
        offsets = [0, PIECE_BYTES - 100, PIECE_BYTES + 5000]

        fast, slow = by_speed([10_000, 20_000, 30_000], offsets, 300, arena.address, PIECE_BYTES, registration)

        at = arena.address
        assert fast == CopyBatch.of([10_000, 20_000], [at, at + PIECE_BYTES - 100], [300, 100])
        assert slow == CopyBatch.of([20_100, 30_000], [at + PIECE_BYTES, at + PIECE_BYTES + 5000], [200, 300])
        registration.close()


def test_a_registered_arena_makes_every_copy_fast() -> None:
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena:
        registration = Registration(arena, Cudart(FakeLibrary()), 0, PIECE_BYTES)
        assert registration.wait(LIMIT_S)

        for offsets, expected in (([0, 900], [500, 500]), ([PIECE_BYTES - 250], [250, 250])):
            fast, slow = by_speed([1] * len(offsets), offsets, 500, arena.address, PIECE_BYTES, registration)
            assert list(fast.sizes) == expected
            assert not slow.sizes
        registration.close()


def test_an_arena_that_is_not_registered_is_cut_too() -> None:
    fast, slow = by_speed([7], [PIECE_BYTES - 1], 3, 1 << 40, PIECE_BYTES, None)

    assert not fast.sizes
    assert list(slow.sizes) == [1, 2]


def test_an_arena_is_adopted_once_and_ends_with_the_copier() -> None:
    here = Stand()
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena:
        registration = here.register(arena)
        assert here.register(arena) is registration
        assert len(here.library.registered) == 2

        here.arenas.close()

        assert here.library.registered == {}
        assert not here.arenas.has(registration)
        here.arenas.adopt(arena)
        assert here.library.registered == {}, "closed"


def test_an_arena_that_nobody_refers_to_is_told_and_let_go() -> None:
    here = Stand()
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as owners:
        arena = MappedArena.attach(os.dup(owners.fd), owners.nbytes)
    registration = here.register(arena)
    assert here.forgotten.empty()

    del arena
    gc.collect()

    assert here.forgotten.get(timeout=LIMIT_S) is registration
    assert here.library.registered != {}, "the collector's thread does nothing long"
    here.arenas.end(registration)
    assert here.library.registered == {}
    assert not here.arenas.has(registration)


ROWS = RowShape(nbytes=100, count=3, pitch_bytes=256)
BLOCK_BYTES = ROWS.count * ROWS.pitch_bytes


@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("direction", CopyDirection)
@pytest.mark.parametrize(
    "offsets",
    [
        [0, BLOCK_BYTES, 2 * BLOCK_BYTES],
        [5 * BLOCK_BYTES, 0, 9000],
        [PIECE_BYTES - BLOCK_BYTES // 2, 0],
        [PIECE_BYTES - BLOCK_BYTES, PIECE_BYTES],
    ],
    ids=["side by side", "scattered", "across pieces", "up to a piece"],
)
def test_rows_come_to_their_places_and_nothing_else_changes(
    offsets: list[int], direction: CopyDirection, is_registered: bool
) -> None:
    here = Stand()
    dense_bytes = ROWS.nbytes * ROWS.count
    device = bytearray(index % 251 for index in range(len(offsets) * dense_bytes))
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena, arena.view(0, arena.nbytes) as host:
        host[:] = bytes(index % 249 for index in range(arena.nbytes))
        expected_device, expected_host = bytearray(device), bytearray(host)
        for number, offset in enumerate(offsets):
            for row in range(ROWS.count):
                at, place = number * dense_bytes + row * ROWS.nbytes, offset + row * ROWS.pitch_bytes
                if direction is CopyDirection.TO_DEVICE:
                    expected_device[at : at + ROWS.nbytes] = host[place : place + ROWS.nbytes]
                else:
                    expected_host[place : place + ROWS.nbytes] = device[at : at + ROWS.nbytes]
        if is_registered:
            here.register(arena)
        first = address_of(memoryview(device))

        addresses = [first + number * dense_bytes for number in range(len(offsets))]
        here.arenas.copy_rows(addresses, arena, offsets, ROWS, direction, 1)

        assert device == expected_device
        assert ctypes.string_at(arena.address, arena.nbytes) == expected_host
        here.arenas.close()


def test_rows_of_neighbours_are_one_copy() -> None:
    here = Stand()
    device = bytearray(4 * ROWS.nbytes * ROWS.count)
    first = address_of(memoryview(device))
    with contextlib.closing(MappedArena.create(2 * PIECE_BYTES)) as arena:
        here.register(arena)

        addresses = [first + number * ROWS.nbytes * ROWS.count for number in range(4)]
        offsets = [number * BLOCK_BYTES for number in (0, 1, 2, 5)]
        here.arenas.copy_rows(addresses, arena, offsets, ROWS, CopyDirection.TO_DEVICE, 1)

        assert here.library.calls.count("cudaMemcpy2DAsync") == 2
        here.arenas.close()
