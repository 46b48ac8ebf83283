"""CUDA's runtime by ctypes, against one that is the host: entries, pieces, registrations."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import threading
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LeaseError, TierUnavailable
from kvtier.memory.copying import address_of
from kvtier.memory.cuda import CopyBatch, CopyDirection, Cudart, Registration, cut, load_cudart, pieces_of
from kvtier.memory.mapped import MappedArena
from tests.support.fake_cudart import FakeLibrary
from tests.support.waiting import LIMIT_S

PIECE_BYTES = 1 << 20
ARENA_BYTES = 3 * PIECE_BYTES + 4096
BLOCK_BYTES = 40
NUM_BLOCKS = 150
STREAM = 77
_UNSAFE = ("cudaHostRegister", "cudaHostUnregister")


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    made = MappedArena.create(ARENA_BYTES)
    yield made
    with contextlib.suppress(LeaseError):
        made.close()


class Sides:
    """A device and a host, both in this process, and the copies of every block between them, in a random order."""

    def __init__(self) -> None:
        rng = random.Random(3)
        self.device = bytearray(rng.randbytes(NUM_BLOCKS * BLOCK_BYTES))
        self.host = bytearray(rng.randbytes(NUM_BLOCKS * BLOCK_BYTES))
        self.before = bytes(self.device), bytes(self.host)
        order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        starts = [address_of(memoryview(side)) for side in (self.device, self.host)]
        device, host = ([start + block * BLOCK_BYTES for block in order] for start in starts)
        self.copies = CopyBatch.of(device, host, [BLOCK_BYTES] * NUM_BLOCKS)


@pytest.mark.parametrize("version", [12080, 12090, 13000, 13010])
@pytest.mark.parametrize("direction", CopyDirection)
def test_a_batch_copies_every_entry_the_way_it_was_asked(version: int, direction: CopyDirection) -> None:
    sides, library = Sides(), FakeLibrary(version)

    Cudart(library).copy(sides.copies, direction, STREAM)

    expected = sides.before[1 if direction is CopyDirection.TO_DEVICE else 0]
    assert sides.device == expected
    assert sides.host == expected
    assert library.batches == [NUM_BLOCKS]
    assert "cudaMemcpyAsync" not in library.calls
    assert set(library.source_orders) == {3 if direction is CopyDirection.TO_DEVICE else 1}


def test_a_runtime_without_batches_copies_one_by_one() -> None:
    sides, library = Sides(), FakeLibrary(12040, has_batch=False)

    Cudart(library).copy(sides.copies, CopyDirection.TO_HOST, STREAM)

    assert sides.host == sides.before[0]
    assert library.calls.count("cudaMemcpyAsync") == NUM_BLOCKS


@pytest.mark.parametrize(("status", "num_asked"), [(801, 1), (36, 1), (1, 2)])
def test_a_batch_that_is_refused_is_copied_one_by_one(status: int, num_asked: int) -> None:
    sides, library = Sides(), FakeLibrary()
    library.statuses["cudaMemcpyBatchAsync"] = status
    cudart = Cudart(library)

    for _ in range(2):
        cudart.copy(sides.copies, CopyDirection.TO_DEVICE, STREAM)

    assert sides.device == sides.before[1]
    assert library.calls.count("cudaMemcpyBatchAsync") == num_asked, "it asks again only where it may help"
    assert library.last_error == 0, "torch finds no error of ours"


def test_a_failed_copy_is_an_error_in_cudas_words() -> None:
    sides, library = Sides(), FakeLibrary()
    library.statuses = {"cudaMemcpyBatchAsync": 700, "cudaMemcpyAsync": 700}

    with pytest.raises(TierUnavailable, match=r"a copy of 40 bytes failed: out of luck \(700\)"):
        Cudart(library).copy(sides.copies, CopyDirection.TO_DEVICE, STREAM)

    assert library.last_error == 0


def test_a_process_without_the_runtime_is_told_so() -> None:
    with pytest.raises(TierUnavailable, match="no CUDA runtime of version 9 or 8"):
        load_cudart((9, 8))


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 1500))
def test_pieces_are_the_range_and_none_straddles(offset: int, nbytes: int, piece_bytes: int) -> None:
    parts = pieces_of(offset, nbytes, piece_bytes)

    assert [byte for start, length in parts for byte in (start, start + length)][1:-1] == [
        byte for start, _ in parts[1:] for byte in (start, start)
    ]
    assert (parts[0][0], parts[-1][0] + parts[-1][1]) == (offset, offset + nbytes)
    assert all(start // piece_bytes == (start + length - 1) // piece_bytes for start, length in parts)


def test_both_sides_of_an_entry_are_cut_in_the_same_place() -> None:
    assert cut([1000, 2000], [90, 0], 20, 100) == [(1000, 90, 10), (1010, 100, 10), (2000, 0, 20)]


def test_an_arena_is_registered_piece_by_piece_and_let_go(arena: MappedArena) -> None:
    library = FakeLibrary()
    registration = Registration(arena, Cudart(library), 0, PIECE_BYTES)

    assert registration.wait(LIMIT_S)
    assert library.registered == {
        arena.address: PIECE_BYTES,
        arena.address + PIECE_BYTES: PIECE_BYTES,
        arena.address + 2 * PIECE_BYTES: PIECE_BYTES,
        arena.address + 3 * PIECE_BYTES: 4096,
    }
    assert registration.covers(0, ARENA_BYTES)

    for _ in range(2):
        registration.close()
    assert library.registered == {}
    assert not registration.covers(0, 1)
    arena.close()


def test_memory_is_registered_and_let_go_in_relaxed_mode_by_each_thread_for_itself(arena: MappedArena) -> None:
    library = FakeLibrary()
    registration = Registration(arena, Cudart(library), 0, PIECE_BYTES)
    assert registration.wait(LIMIT_S)

    registration.close()

    relaxed = 2
    by_call = {name: [(thread, mode) for called, thread, mode in library.modes if called == name] for name in _UNSAFE}
    assert [mode for _, mode in by_call["cudaHostRegister"]] == [relaxed] * 4
    assert by_call["cudaHostUnregister"] == [(threading.get_ident(), relaxed)] * 4
    assert threading.get_ident() not in {thread for thread, _ in by_call["cudaHostRegister"]}
    assert library.capture_mode == 0, "this thread may capture graphs as before"


@pytest.mark.parametrize("is_relaxed_before", [False, True])
def test_a_thread_has_its_capture_mode_back_after_a_failure(is_relaxed_before: bool) -> None:
    library = FakeLibrary()
    library.statuses["cudaHostRegister"] = 2
    cudart = Cudart(library)

    with cudart.relaxed() if is_relaxed_before else contextlib.nullcontext():
        before = library.capture_mode
        with pytest.raises(TierUnavailable, match="cannot register"):
            cudart.register(4096, 4096)
        assert library.capture_mode == before == (2 if is_relaxed_before else 0)


def test_a_registered_arena_stays_mapped(arena: MappedArena) -> None:
    registration = Registration(arena, Cudart(FakeLibrary()), 0, PIECE_BYTES)

    with pytest.raises(LeaseError, match="still in use"):
        arena.close()

    registration.close()
    arena.close()


def test_a_registration_keeps_the_mapping_and_not_the_arena() -> None:
    with contextlib.closing(MappedArena.create(8192)) as owners:
        arena = MappedArena.attach(os.dup(owners.fd), 8192)
    registration = Registration(arena, Cudart(FakeLibrary()), 0, PIECE_BYTES)
    registration.wait(LIMIT_S)
    seen = weakref.ref(arena)

    del arena
    gc.collect()

    assert seen() is None
    assert registration.covers(0, 8192)
    registration.close()


def test_closing_while_a_piece_is_being_registered_leaves_none(arena: MappedArena) -> None:
    library = FakeLibrary()
    library.may_register.clear()
    registration = Registration(arena, Cudart(library), 0, PIECE_BYTES)
    closing = threading.Thread(target=registration.close)
    closing.start()

    assert not registration.covers(0, 1)
    library.may_register.set()
    closing.join(LIMIT_S)

    assert library.registered == {}
    assert library.calls.count("cudaHostRegister") <= 1
    arena.close()


def test_what_cannot_be_registered_is_said_once_and_left(arena: MappedArena, caplog: pytest.LogCaptureFixture) -> None:
    library = FakeLibrary()
    library.max_registered_pieces = 2
    with caplog.at_level(logging.WARNING):
        registration = Registration(arena, Cudart(library), 0, PIECE_BYTES)
        assert not registration.wait(LIMIT_S)

    assert registration.covers(0, 2 * PIECE_BYTES)
    assert not registration.covers(2 * PIECE_BYTES - 1, 2)
    assert [record.message for record in caplog.records] == [
        f"copies go through unregistered memory from byte {2 * PIECE_BYTES} of {ARENA_BYTES}: "
        "cannot register 1MiB of memory: out of luck (2)"
    ]
    registration.close()
    assert library.registered == {}


def test_a_closed_arena_is_not_registered() -> None:
    arena = MappedArena.create(8192)
    arena.close()

    with pytest.raises(LeaseError):
        Registration(arena, Cudart(FakeLibrary()), 0, PIECE_BYTES)
