"""Leases and reservations: views that end with their scope."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import ConfigError, LeaseError
from kvtier.memory.lease import BlockLease, EmptyLease, Reservation
from kvtier.memory.mapped import MappedArena

BLOCK_BYTES = 64
OFFSETS = (4096, 0, 8192)
HASHES = [BlockHash(bytes([number]) * 32) for number in range(3)]


class Events:
    """What a scope told its owner."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def end(self) -> None:
        self.seen.append("end")

    def forget(self) -> None:
        self.seen.append("forget")

    def commit(self, first: int, count: int) -> int:
        self.seen.append((first, count))
        return count

    def pull(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        self.seen.append(("pull", list(hashes)))
        for view in into:
            view[:] = b"p" * BLOCK_BYTES
        return len(into)


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    with contextlib.closing(MappedArena.create(3 * 4096)) as made:
        for number, offset in enumerate(OFFSETS):
            with made.view(offset, BLOCK_BYTES) as view:
                view[:] = content(number)
        yield made


@pytest.fixture
def events() -> Events:
    return Events()


def content(number: int) -> bytes:
    return bytes([number + 1]) * BLOCK_BYTES


def lease_of(arena: MappedArena | None, events: Events) -> BlockLease:
    return BlockLease(
        arena,
        OFFSETS,
        BLOCK_BYTES,
        HASHES,
        MatchEnd.ALL,
        events.pull,
        lambda count: count,
        len(OFFSETS),
        events.end,
        events.forget,
    )


def reservation_of(arena: MappedArena, events: Events) -> Reservation:
    return Reservation(arena, OFFSETS, BLOCK_BYTES, (0, 2, 3), (1, 2, 4), events.commit, events.end, events.forget)


def buffers(count: int = 3) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


# --- leases --------------------------------------------------------------------------------------------------------


def test_views_are_the_blocks_in_order_and_cannot_be_written(arena: MappedArena, events: Events) -> None:
    with lease_of(arena, events) as lease:
        assert [bytes(view) for view in lease.views()] == [content(number) for number in range(3)]
        assert all(view.readonly for view in lease.views())


def test_the_end_of_a_lease_is_told_once(arena: MappedArena, events: Events) -> None:
    lease = lease_of(arena, events)
    lease.release()
    lease.release()

    assert events.seen == ["end"]


def test_views_end_with_their_lease(arena: MappedArena, events: Events) -> None:
    lease = lease_of(arena, events)
    (first, *_) = lease.views()
    lease.release()

    with pytest.raises(ValueError, match="released"):
        bytes(first)


@pytest.mark.parametrize("use", [BlockLease.views, lambda lease: lease.fetch(buffers())], ids=["views", "fetch"])
def test_a_lease_that_has_ended_is_of_no_use(arena: MappedArena, events: Events, use: object) -> None:
    lease = lease_of(arena, events)
    lease.release()

    with pytest.raises(LeaseError, match="has ended"):
        use(lease)  # type: ignore[operator]


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_as_many_blocks_are_fetched_as_there_are_buffers(arena: MappedArena, events: Events, count: int) -> None:
    into = buffers(count)
    with lease_of(arena, events) as lease:
        arrived = lease.fetch(into)

    assert arrived == min(count, 3)
    assert into == [content(number) for number in range(arrived)] + buffers(count - arrived)


def test_a_buffer_of_another_size_is_refused_and_nothing_is_written(arena: MappedArena, events: Events) -> None:
    into = [bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES + 1)]
    with lease_of(arena, events) as lease, pytest.raises(ConfigError, match="buffer 1"):
        lease.fetch(into)

    assert not any(into[0])


@pytest.mark.parametrize(
    "keep",
    [
        lambda view: memoryview(view),
        lambda view: view[1:2],
        lambda view: view.cast("Q"),
        lambda view: view.obj,
    ],
    ids=["view of a view", "slice", "cast", "object"],
)
def test_a_lease_does_not_end_while_something_made_of_its_views_lives(
    arena: MappedArena, events: Events, keep: object
) -> None:
    lease = lease_of(arena, events)
    kept = keep(lease.views()[1])  # type: ignore[operator]

    with pytest.raises(LeaseError, match="still in use"):
        lease.release()

    assert events.seen == []
    assert bytes(kept)[0] == 2
    del kept
    lease.release()
    assert events.seen == ["end"]


def test_a_lease_that_could_not_end_still_fetches(arena: MappedArena, events: Events) -> None:
    lease = lease_of(arena, events)
    kept = lease.views()[0][:1]
    into = buffers()
    with pytest.raises(LeaseError):
        lease.release()

    assert lease.fetch(into) == 3
    assert into[2] == content(2)
    del kept
    lease.release()


def test_a_lease_that_could_not_end_still_has_views(arena: MappedArena, events: Events) -> None:
    lease = lease_of(arena, events)
    kept = lease.views()[1][:1]
    try:
        with pytest.raises(LeaseError):
            lease.release()
        assert bytes(lease.views()[0]) == content(0)
    finally:
        del kept
        lease.release()


def test_a_lease_without_an_arena_pulls_its_blocks(events: Events) -> None:
    into = buffers(2)
    with lease_of(None, events) as lease:
        assert not lease.has_views
        assert lease.fetch(into) == 2

    assert events.seen == [("pull", HASHES[:2]), "end"]
    assert into == [b"p" * BLOCK_BYTES] * 2


def test_a_lease_without_an_arena_has_no_views(events: Events) -> None:
    with lease_of(None, events) as lease, pytest.raises(LeaseError, match="fetch them"):
        lease.views()


def test_an_error_inside_a_lease_is_not_hidden_by_views_in_use(
    arena: MappedArena, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    lease = lease_of(arena, events)
    kept = lease.views()[0][:1]

    with caplog.at_level(logging.WARNING), pytest.raises(KeyError, match="the caller's"):
        with lease:
            raise KeyError("the caller's")

    assert "stay leased" in caplog.text
    assert events.seen == []
    del kept
    lease.release()


def test_a_forgotten_lease_warns_and_ends_late(arena: MappedArena, events: Events) -> None:
    lease = lease_of(arena, events)

    with pytest.warns(ResourceWarning, match="never ended"):
        del lease

    assert events.seen == ["forget"]


def test_a_forgotten_lease_whose_views_live_on_keeps_its_blocks(
    arena: MappedArena, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    lease = lease_of(arena, events)
    kept = lease.views()[0][:]

    with pytest.warns(ResourceWarning, match="never ended"):
        del lease

    assert events.seen == []
    assert "stay leased" in caplog.text
    assert bytes(kept) == content(0)
    del kept


# --- reservations --------------------------------------------------------------------------------------------------


def test_what_is_written_into_a_slots_view_is_in_the_arena(arena: MappedArena, events: Events) -> None:
    with reservation_of(arena, events) as reservation:
        reservation.views()[0][:] = b"w" * BLOCK_BYTES

    with arena.view(OFFSETS[0], BLOCK_BYTES) as view:
        assert bytes(view) == b"w" * BLOCK_BYTES


def test_filled_slots_hold_their_blocks_and_nothing_beside_them_changes(arena: MappedArena, events: Events) -> None:
    blocks = [bytes([0x40 + number]) * BLOCK_BYTES for number in range(3)]
    with reservation_of(arena, events) as reservation:
        reservation.fill([memoryview(block) for block in blocks])

    for offset, block in zip(OFFSETS, blocks, strict=True):
        with arena.view(offset, 4096) as view:
            assert bytes(view) == block.ljust(4096, b"\0")


def test_a_commit_names_all_slots_or_a_range(arena: MappedArena, events: Events) -> None:
    with reservation_of(arena, events) as reservation:
        assert reservation.commit() == 3
        assert reservation.commit(1) == 2
        assert reservation.commit(0, 1) == 1

    assert events.seen == [(0, 3), (1, 2), (0, 1), "end"]


def test_a_reservation_says_what_became_of_the_others(arena: MappedArena, events: Events) -> None:
    with reservation_of(arena, events) as reservation:
        assert (reservation.num_blocks, reservation.positions) == (3, (0, 2, 3))
        assert (reservation.num_ready, reservation.num_pending, reservation.num_refused) == (1, 2, 4)


@pytest.mark.parametrize(
    "use",
    [Reservation.views, Reservation.commit, lambda reservation: reservation.fill([])],
    ids=["views", "commit", "fill"],
)
def test_a_reservation_that_was_closed_is_of_no_use(arena: MappedArena, events: Events, use: object) -> None:
    reservation = reservation_of(arena, events)
    reservation.close()
    reservation.close()

    with pytest.raises(LeaseError, match="has ended"):
        use(reservation)  # type: ignore[operator]
    assert events.seen == ["end"]


def test_a_reservation_in_use_does_not_close(arena: MappedArena, events: Events) -> None:
    reservation = reservation_of(arena, events)
    kept = reservation.views()[2][:8]

    with pytest.raises(LeaseError, match="still in use"):
        reservation.close()

    kept.release()
    reservation.close()


def test_a_forgotten_reservation_warns_and_ends_late(arena: MappedArena, events: Events) -> None:
    reservation = reservation_of(arena, events)

    with pytest.warns(ResourceWarning, match="Reservation was never ended"):
        del reservation

    assert events.seen == ["forget"]


def test_a_block_of_another_size_is_not_filled_in(arena: MappedArena, events: Events) -> None:
    blocks = [memoryview(bytes(BLOCK_BYTES // 2))] * 3
    with reservation_of(arena, events) as reservation, pytest.raises(ConfigError):
        reservation.fill(blocks)


def test_fewer_blocks_than_slots_are_refused(arena: MappedArena, events: Events) -> None:
    with reservation_of(arena, events) as reservation, pytest.raises(ConfigError):
        reservation.fill([memoryview(bytes(BLOCK_BYTES))])


# --- nothing -------------------------------------------------------------------------------------------------------


def test_an_empty_lease_gives_nothing_and_says_why() -> None:
    with EmptyLease(MatchEnd.TIER_DOWN) as lease:
        assert (lease.num_blocks, lease.ended, lease.views(), lease.fetch(buffers())) == (0, MatchEnd.TIER_DOWN, [], 0)
