"""The disk store by itself: bytes come back, and dropped ones do not."""

from __future__ import annotations

import errno
import mmap
import threading
from pathlib import Path

import pytest

from kvtier.errors import TierRefused
from kvtier.stores.disk import Written
from tests.support.faulty_files import FaultyFiles
from tests.support.store_building import (
    DATA_NAME,
    MIB,
    NAMESPACE,
    OTHER_NAMESPACE,
    UNIT,
    crashed,
    hash_of,
    opened,
    payload,
    read,
    read_rightly,
    size_of,
    space_of,
    stored_among,
    use,
    write,
)

# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 100, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT + 7, 100_000])
def test_blocks_of_any_size_come_back_byte_for_byte_also_after_opening_again(tmp_path: Path, block_bytes: int) -> None:
    for _ in range(2):
        with opened(tmp_path) as store:
            space = space_of(store, block_bytes)
            write(store, space, range(10))
            assert read_rightly(store, space, range(10)) == set(range(10))


def test_a_block_is_written_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store)
        assert write(store, space, [1, 1]) == [Written.NEW, Written.PRESENT]


def test_many_blocks_are_written_and_read_in_one_go_wherever_they_lie(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store, 3 * UNIT)
        write(store, space, range(0, 40, 3))
        store.drop(space, [hash_of(number) for number in range(0, 40, 6)])
        memory = memoryview(mmap.mmap(-1, 40 * space.slot_bytes))
        slots = [memory[number * space.slot_bytes : (number + 1) * space.slot_bytes] for number in range(40)]
        for number in range(40):
            slots[number][:] = payload(hash_of(number), 3 * UNIT)
        slots[7:9] = [memoryview(bytes(slot)) for slot in slots[7:9]]  # not aligned, as a caller's own memory
        hashes = [hash_of(number) for number in range(40)]
        outcomes = store.write(space, hashes, slots)
        assert [number for number in range(40) if outcomes[number] is Written.PRESENT] == list(range(3, 40, 6))
        assert outcomes.count(Written.NEW) == 33
        assert read_rightly(store, space, range(40)) == set(range(40))
        into = [memoryview(bytearray(3 * UNIT)) for _ in range(40)]
        blocks = store.match(space, hashes)
        assert store.read(blocks, into) == [None] * 40
        store.free(blocks)
        assert [bytes(view) for view in into] == [payload(block_hash, 3 * UNIT) for block_hash in hashes]


def test_of_many_blocks_the_leading_ones_get_the_room_there_is(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store, 16 * UNIT)
        hashes = [hash_of(number) for number in range(30)]
        outcomes = store.write(space, hashes, [memoryview(payload(key, 16 * UNIT)) for key in hashes])
        num_new = outcomes.count(Written.NEW)
        assert 10 < num_new < 20
        assert outcomes == [Written.NEW] * num_new + [Written.NO_ROOM] * (30 - num_new)
        assert read_rightly(store, space, range(30)) == set(range(num_new))


def test_small_blocks_get_records_in_a_store_that_large_ones_have_filled(tmp_path: Path) -> None:
    with opened(tmp_path, 8 * MIB) as store:
        large, small = space_of(store, 64 * UNIT), space_of(store, UNIT, OTHER_NAMESPACE)
        write(store, large, range(60))
        write(store, small, range(1500))
        assert len(read_rightly(store, small, range(1500))) > 1400
        read_rightly(store, large, range(60))
        assert size_of(tmp_path) <= 8 * MIB
        assert store.losses == {}
    with opened(tmp_path, 8 * MIB) as store:
        assert len(read_rightly(store, space_of(store, UNIT, OTHER_NAMESPACE), range(1500))) > 1400
        assert store.losses == {}


def test_what_was_written_survives_the_end_of_the_process_without_any_flush(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        write(store, space_of(store), range(100))
        store.drop(space_of(store), [hash_of(number) for number in range(10)])
        left = crashed(tmp_path / "store", tmp_path / "left")
    with opened(left) as store:
        assert store.recovery.num_blocks == 90
        assert read_rightly(store, space_of(store), range(100)) == set(range(10, 100))


def test_several_namespaces_with_blocks_of_several_sizes_share_one_folder(tmp_path: Path) -> None:
    for turn in range(2):
        with opened(tmp_path, 8 * MIB) as store:
            small, large = space_of(store, 3000), space_of(store, 5 * UNIT, OTHER_NAMESPACE)
            if not turn:
                write(store, small, range(50))
                write(store, large, range(50))
            assert read_rightly(store, small, range(50)) == set(range(50))
            assert read_rightly(store, large, range(50)) == set(range(50))
            assert {space.namespace: len(space.index) for space in store.spaces()} == {
                NAMESPACE: 50,
                OTHER_NAMESPACE: 50,
            }


def test_a_namespace_with_blocks_of_another_size_is_refused_until_it_is_empty(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store, 3000), range(3))
        with pytest.raises(TierRefused, match="blocks of 3000 bytes on disk, not 5000"):
            space_of(store, 5000)
        store.drop(space_of(store, 3000))
        space = space_of(store, 5000)
        write(store, space, range(3))
        assert len(read_rightly(store, space, range(3))) == 3


def test_everyone_who_opens_a_namespace_sees_the_same_blocks(tmp_path: Path) -> None:
    """Also who opened it while it was empty, as the threads of a server do."""
    with opened(tmp_path) as store:
        mine, yours = space_of(store), space_of(store)
        write(store, mine, range(5))
        write(store, yours, range(5, 10))
        for space in (mine, yours, space_of(store)):
            assert read_rightly(store, space, range(10)) == set(range(10))


def test_large_blocks_find_room_among_small_ones(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * MIB) as store:
        small, large = space_of(store), space_of(store, 20 * UNIT, OTHER_NAMESPACE)
        write(store, small, range(600))
        write(store, large, range(10))
        assert len(read_rightly(store, large, range(10))) >= 8, "what was just written is not what makes room"
        read_rightly(store, small, range(600))
        assert size_of(tmp_path) <= 2 * MIB


# --- forgetting --------------------------------------------------------------------------------------------------


def test_a_dropped_block_is_gone_for_good_and_its_room_is_used_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store)
        write(store, space, range(100))
        used = store.levels()["used_bytes"]
        assert store.drop(space, [hash_of(number) for number in range(50)]) == 50
        write(store, space, range(100, 150))
        assert store.levels()["used_bytes"] == used
    with opened(tmp_path) as store:
        assert read_rightly(store, space_of(store), range(150)) == set(range(50, 150))
        assert store.drop(space_of(store)) == 100
    with opened(tmp_path) as store:
        assert store.recovery.num_blocks == 0


def test_a_hash_that_is_dropped_twice_gives_its_record_back_once(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        space = space_of(store)
        write(store, space, range(100))
        assert store.drop(space, [hash_of(number) for number in range(50)] * 2) == 50
        write(store, space, range(1000, 1200))
        left = crashed(tmp_path / "store", tmp_path / "left")
    with opened(left) as store:
        expected = {*range(50, 100), *range(1000, 1200)}
        assert read_rightly(store, space_of(store), range(1200)) == expected, "two blocks had one record"


def test_a_drop_that_fails_leaks_no_record_and_is_made_up_for(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        space = space_of(store)
        write(store, space, range(20))
        files.fail("write", errno.EIO, times=1)
        with pytest.raises(OSError, match="Input/output"):
            store.drop(space, [hash_of(number) for number in range(10)])
        assert stored_among(store, space, range(20)) == set(range(10, 20))
        write(store, space, range(100, 900))
    with opened(tmp_path) as store:
        assert not read_rightly(store, space_of(store), range(10))
        assert store.losses == {}


def test_a_drop_while_recency_is_saved_costs_no_other_block_its_record(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path / "store", files=files) as store:
        space = space_of(store)
        write(store, space, range(256))  # all records of a chunk: the next block takes the dropped one's
        use(store, space, 7)

        def drop_and_write() -> None:
            store.drop(space, [hash_of(7)])
            write(store, space, [1000])

        other = threading.Thread(target=drop_and_write)

        def meanwhile(data: memoryview, offset: int) -> None:
            files.before_write = None
            other.start()
            other.join(0.3)  # it may have to wait for us

        files.before_write = meanwhile
        store.save_recency()
        other.join()
        left = crashed(tmp_path / "store", tmp_path / "left")
    with opened(left) as store:
        there = read_rightly(store, space_of(store), range(1001))
        assert 1000 in there, "its record was written over"
        assert 7 not in there, "a dropped block came back"


def test_a_drop_while_a_block_is_written_is_not_undone_by_the_end_of_the_write(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path / "store", files=files) as store:
        space = space_of(store)
        write(store, space, range(5))

        def meanwhile(data: memoryview, offset: int) -> None:
            files.before_write = None
            store.drop(space)

        files.before_write = meanwhile
        write(store, space, [5])
        assert stored_among(store, space, range(6)) == set()
        left = crashed(tmp_path / "store", tmp_path / "left")
    with opened(left) as store:
        assert read_rightly(store, space_of(store), range(6)) == set()


def test_what_is_not_there_is_not_corrupt(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.verify(space_of(store), hash_of(1))
        assert store.losses == {}


def test_a_pin_of_a_block_that_is_just_being_read_is_written_down(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        space = space_of(store)
        write(store, space, range(3))
        block = store.match(space, [hash_of(1)])[0]
        store._pool.hold(block)  # as `verify` does
        store.pin(space, [hash_of(1)])
        store.save_recency()
        store._pool.let_go(block)
        store.free([block])
    with opened(tmp_path) as store:
        assert [is_pinned for _, is_pinned in store.blocks(space_of(store))].count(True) == 1


def test_verify_finds_what_is_wrong_and_does_not_count_as_a_use(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(190))
        there = sorted(stored_among(store, space, range(190)))
        assert all(store.verify(space, hash_of(number)) for number in there)
        write(store, space, range(1000, 1050))
        assert store.levels()["evicted_blocks"] > 0
        assert stored_among(store, space, range(190)) == set(there[-len(stored_among(store, space, range(190))) :])
        number = max(there)
        start = store.match(space, [hash_of(number)])[0]
        with (tmp_path / DATA_NAME).open("r+b") as file:
            file.seek(start.start * UNIT)
            file.write(b"damage")
        store.free([start])
        assert not store.verify(space, hash_of(number))
        assert read(store, space, number) is None
        assert store.losses == {"corrupt": 1}


def test_what_would_leave_next_is_held_while_it_is_passed_on_and_keeps_its_place(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(20))
        assert store.hold_leaving(8) == [], "there is room"
        write(store, space, range(20, 400))
        there = sorted(stored_among(store, space, range(400)))
        leaving = store.hold_leaving(8)
        assert {block.hash for block in leaving} == {hash_of(number) for number in there[:8]}

        write(store, space, range(1000, 1010))
        assert set(there[:8]) <= stored_among(store, space, range(400)), "what is held stays"
        store.let_go(leaving)
        write(store, space, range(1010, 1020))
        assert not stored_among(store, space, range(there[7] + 1)), "then it is the first to go, as before"
