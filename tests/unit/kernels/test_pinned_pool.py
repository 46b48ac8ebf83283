"""A slot is handed out again only when the device is through with it."""

from __future__ import annotations

import threading

import torch

from kvtier.kernels.pinned_pool import PinnedPool, PinnedSlot


class FakeEvent:
    """The device is through when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def record(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


def make_pool() -> PinnedPool:
    return PinnedPool(lambda num_words: torch.zeros(num_words, dtype=torch.int32), FakeEvent)


def use(pool: PinnedPool, nbytes: int) -> PinnedSlot:
    slot = pool.take(nbytes)
    slot.event.record()
    pool.give_back(slot)
    return slot


def test_a_slot_that_the_device_may_still_read_is_left_alone() -> None:
    pool = make_pool()
    first = use(pool, 100)

    assert pool.take(100) is not first
    first.event.synchronize()
    assert pool.take(100) is first


def test_a_slot_that_was_not_given_back_is_left_alone() -> None:
    pool = make_pool()
    first = pool.take(100)
    first.event.record()
    first.event.synchronize()

    assert pool.take(100) is not first


def test_slots_are_as_large_as_asked_and_their_two_sides_are_one_memory() -> None:
    pool = make_pool()

    for nbytes in (0, 1, 16 << 10, (16 << 10) + 1, 3 << 20):
        slot = pool.take(nbytes)
        assert slot.data.nbytes == 4 * slot.words.numel() >= max(nbytes, 1)
        slot.data[:] = 0xFF
        assert bool((slot.words == -1).all())


def test_steady_use_needs_no_more_slots_than_are_under_way() -> None:
    pool = make_pool()
    under_way: list[PinnedSlot] = []

    for _ in range(100):
        under_way.append(use(pool, 5000))
        if len(under_way) == 3:
            under_way.pop(0).event.synchronize()

    assert pool.num_slots == 3


def test_slots_of_many_sizes_are_cut_from_one_piece_and_do_not_overlap() -> None:
    pieces: list[torch.Tensor] = []

    def allocate(num_words: int) -> torch.Tensor:
        pieces.append(torch.zeros(num_words, dtype=torch.int32))
        return pieces[-1]

    pool = PinnedPool(allocate, FakeEvent)
    slots = [pool.take(nbytes) for nbytes in (1, 100_000, 16 << 10, 3 << 20, 1, 16 << 20)]
    for number, slot in enumerate(slots):
        slot.words.fill_(number)

    assert all(bool((slot.words == number).all()) for number, slot in enumerate(slots))
    assert all(slot.words.data_ptr() % 16 == 0 for slot in slots)
    assert len([piece for piece in pieces if piece.numel()]) == 1
    assert pool.take(64 << 20).data.nbytes == 64 << 20
    assert len([piece for piece in pieces if piece.numel()]) == 2


def test_two_threads_never_have_the_same_slot() -> None:
    pool = make_pool()
    num_clashes = 0

    def work(number: int) -> None:
        nonlocal num_clashes
        for _ in range(300):
            slot = pool.take(64)
            slot.words.fill_(number)
            num_clashes += int((slot.words != number).any())
            slot.event.record()
            slot.event.synchronize()
            pool.give_back(slot)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not num_clashes
