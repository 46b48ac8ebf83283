"""The disk store by itself: an exact LRU within its bound, whole after any end of the process."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import random
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierFull, TierRefused
from kvtier.memory.checksum import checksum_of
from kvtier.stores.disk import DiskStore, StoreSpace, Written
from kvtier.stores.folder import MIN_FILE_BYTES
from kvtier.stores.records import HEADER_BYTES, BlockRecord, Header, encode_block, encode_header
from tests.support.faulty_files import FaultyFiles
from tests.support.store_building import (
    DATA_NAME,
    MIB,
    NAMESPACE,
    OTHER_NAMESPACE,
    RECORDS_NAME,
    UNIT,
    crashed,
    hash_of,
    opened,
    payload,
    read,
    read_rightly,
    space_of,
    write,
)


def _there(store: DiskStore, space: StoreSpace, numbers: range) -> set[int]:
    flags = store.contains(space, [hash_of(number) for number in numbers])
    return {number for number, is_there in zip(numbers, flags, strict=True) if is_there}


def _use(store: DiskStore, space: StoreSpace, number: int) -> bool:
    blocks = store.match(space, [hash_of(number)])
    store.free(blocks)
    return bool(blocks)


def _size(folder: Path) -> int:
    return sum(max(path.stat().st_size, path.stat().st_blocks * 512) for path in folder.iterdir())


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
        assert _size(tmp_path) <= 8 * MIB
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
        assert _size(tmp_path) <= 2 * MIB


# --- the bound and the order of eviction -------------------------------------------------------------------------


def test_the_folder_never_exceeds_the_bound_whatever_is_written(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * MIB) as store:
        for number in range(2000):
            write(store, space_of(store), [number])
            assert _size(tmp_path) <= 3 * MIB
        assert len(read_rightly(store, space_of(store), range(2000))) > 600


def test_other_files_in_the_folder_count(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(bytes(MIB))
    with opened(tmp_path, 3 * MIB) as store:
        write(store, space_of(store), range(1000))
        assert _size(tmp_path) <= 3 * MIB
    with pytest.raises(ConfigError, match=r"other files in .* take 1MiB of the 1MiB allowed"):
        DiskStore(tmp_path, MIB)


def test_too_small_a_file_space_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file space must be at least"):
        DiskStore(tmp_path, MIN_FILE_BYTES - 1)
    with opened(tmp_path, MIN_FILE_BYTES) as store:
        write(store, space_of(store), range(5))
        assert read_rightly(store, space_of(store), range(5)) == {4}


def test_a_block_larger_than_the_file_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        write(store, space_of(store), range(20))
        with pytest.raises(TierFull):
            write(store, space_of(store, 2 * MIB, OTHER_NAMESPACE), [1])
        assert read_rightly(store, space_of(store), range(20)) == set(range(20))


def test_the_hit_rate_of_a_zipf_like_load_is_that_of_an_exact_lru_before_and_after_a_restart(tmp_path: Path) -> None:
    file_space = 4 * MIB
    with opened(tmp_path / "probe", file_space) as store:
        space = space_of(store)
        write(store, space, range(1100))
        capacity = len(space.index)
        assert store.levels()["evicted_blocks"] == 1100 - capacity
    rng = random.Random(1)
    num_keys = 4 * capacity
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.8 for rank in range(num_keys)))
    model: OrderedDict[int, None] = OrderedDict()
    num_written = 0
    for _ in range(2):
        hits = model_hits = 0
        with opened(tmp_path / "store", file_space) as store:
            space = space_of(store)
            for number in rng.choices(range(num_keys), cum_weights=weights, k=5000):
                if _use(store, space, number):
                    hits += 1
                else:
                    write(store, space, [number])
                    num_written += 1
                model_hits += number in model
                model[number] = None
                model.move_to_end(number)
                if len(model) > capacity:
                    model.popitem(last=False)
            assert store.losses == {}
        assert 0.2 < model_hits / 5000 < 0.9
        assert abs(hits - model_hits) / 5000 < 0.01
    assert num_written > 2 * capacity


def test_recency_survives_a_restart_and_recovered_blocks_are_evicted_coldest_first(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * MIB) as store:
        space = space_of(store)
        write(store, space, range(600))
        there = _there(store, space, range(600))
        assert len(there) < 500, "it must be full"
        warmed = sorted(there)[:50]
        for number in warmed:
            _use(store, space, number)
    with opened(tmp_path, 2 * MIB) as store:
        space = space_of(store)
        assert _there(store, space, range(600)) == there
        write(store, space, range(1000, 1000 + len(there) - 60))
        left = _there(store, space, range(600))
        assert set(warmed) <= left
        assert left - set(warmed) <= set(sorted(there)[-20:]), "the coldest went first"


def test_a_saved_recency_survives_a_crash(tmp_path: Path) -> None:
    with opened(tmp_path / "store", MIB) as store:
        space = space_of(store)
        write(store, space, range(100))
        for number in range(10):
            _use(store, space, number)
        store.flush(fsync=False)
        left = crashed(tmp_path / "store", tmp_path / "left")
    with opened(left, MIB) as store:
        space = space_of(store)
        write(store, space, range(1000, 1170))
        assert store.levels()["evicted_blocks"] > 20
        assert set(range(10)) <= _there(store, space, range(100))


def test_a_smaller_budget_evicts_and_the_file_shrinks(tmp_path: Path) -> None:
    with opened(tmp_path, 8 * MIB) as store:
        write(store, space_of(store), range(1500))
        warm = range(600, 650)
        for number in warm:
            _use(store, space_of(store), number)
        assert _size(tmp_path) > 5 * MIB
    with opened(tmp_path, 2 * MIB) as store:
        assert _size(tmp_path) <= 2 * MIB
        there = read_rightly(store, space_of(store), range(1500))
        assert len(there) > 400
        assert there == set(warm) | set(range(1500 - len(there) + len(warm), 1500)), "the coldest went"
        assert store.losses == {"over the budget": 1500 - len(there)}
        write(store, space_of(store), range(2000, 2100))
        assert read_rightly(store, space_of(store), range(2000, 2100)) == set(range(2000, 2100))
        assert _size(tmp_path) <= 2 * MIB
    with opened(tmp_path, 2 * MIB) as store:
        assert read_rightly(store, space_of(store), range(2000, 2100)) == set(range(2000, 2100))
        assert store.losses == {}


def test_a_larger_budget_lets_the_file_grow(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        write(store, space_of(store), range(300))
        there = _there(store, space_of(store), range(300))
        assert len(there) < 250
    with opened(tmp_path, 6 * MIB) as store:
        write(store, space_of(store), range(1000, 1900))
        assert read_rightly(store, space_of(store), range(1000, 1900)) == set(range(1000, 1900))
        assert read_rightly(store, space_of(store), range(300)) == there, "nothing had to go"


def test_pins_survive_a_restart_and_any_flood(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(20))
        assert store.pin(space, [hash_of(number) for number in range(10)]) == 10
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        assert sum(is_pinned for _, is_pinned in store.blocks(space)) == 10
        write(store, space, range(1000, 1500))
        assert read_rightly(store, space, range(20)) == set(range(10))
        assert store.unpin(space, [hash_of(number) for number in range(10)]) == 10
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(2000, 2500))
        assert read_rightly(store, space, range(20)) == set()


def test_pins_beyond_half_of_the_budget_are_not_made(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(180))
        num_pinned = store.pin(space, [hash_of(number) for number in range(180)])
        assert 100 < num_pinned < 130
        write(store, space, range(1000, 1200))


def test_more_pinned_than_a_smaller_budget_holds_is_no_end_of_the_store(tmp_path: Path) -> None:
    with opened(tmp_path, 6 * MIB) as store:
        space = space_of(store)
        write(store, space, range(1100))
        store.pin(space, [hash_of(number) for number in range(1100)])
    for _ in range(2):
        with opened(tmp_path, MIB) as store:
            space = space_of(store)
            there = read_rightly(store, space, range(1100))
            store.flush(fsync=False)
            assert _size(tmp_path) <= MIB
            store.unpin(space, [hash_of(number) for number in there])
            write(store, space, range(2000, 2010))
            assert read_rightly(store, space, range(2000, 2010)) == set(range(2000, 2010))
            assert read_rightly(store, space, range(1100)) <= there


def test_a_store_full_of_references_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, MIB) as store:
        space = space_of(store)
        write(store, space, range(300))
        there = sorted(_there(store, space, range(300)))
        held = [store.match(space, [hash_of(number)]) for number in there]
        with pytest.raises(TierFull):
            write(store, space, [1000])
        for blocks in held:
            store.free(blocks)
        write(store, space, [1000])
        assert read_rightly(store, space, range(300)) == set(there[1:]), "the one that was freed first went"


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
        assert _there(store, space, range(20)) == set(range(10, 20))
        write(store, space, range(100, 900))
    with opened(tmp_path) as store:
        assert not read_rightly(store, space_of(store), range(10))
        assert store.losses == {}


def test_a_drop_while_recency_is_saved_costs_no_other_block_its_record(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path / "store", files=files) as store:
        space = space_of(store)
        write(store, space, range(256))  # all records of a chunk: the next block takes the dropped one's
        _use(store, space, 7)

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
        assert _there(store, space, range(6)) == set()
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
        there = sorted(_there(store, space, range(190)))
        assert all(store.verify(space, hash_of(number)) for number in there)
        write(store, space, range(1000, 1050))
        assert store.levels()["evicted_blocks"] > 0
        assert _there(store, space, range(190)) == set(there[-len(_there(store, space, range(190))) :])
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
        there = sorted(_there(store, space, range(400)))
        leaving = store.hold_leaving(8)
        assert {block.hash for block in leaving} == {hash_of(number) for number in there[:8]}

        write(store, space, range(1000, 1010))
        assert set(there[:8]) <= _there(store, space, range(400)), "what is held stays"
        store.let_go(leaving)
        write(store, space, range(1010, 1020))
        assert not _there(store, space, range(there[7] + 1)), "then it is the first to go, as before"


# --- opening -----------------------------------------------------------------------------------------------------


def test_a_second_opener_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match=f"folder {tmp_path} is in use by another process"):
        DiskStore(tmp_path, MIB)


def test_a_folder_that_is_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskStore(tmp_path / "file", MIB)


def test_a_filesystem_without_direct_io_is_used_anyway_and_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    files.refuses_direct = True
    with opened(tmp_path, files=files) as store:
        space = space_of(store, 3 * UNIT + 5)
        write(store, space, range(20))
        assert read_rightly(store, space, range(20)) == set(range(20))
    said = [record.getMessage() for record in caplog.records if "direct I/O" in record.getMessage()]
    assert said == [f"disk store {tmp_path}: this filesystem has no direct I/O; using buffered I/O"]
    with opened(tmp_path) as store:
        assert len(read_rightly(store, space_of(store, 3 * UNIT + 5), range(20))) == 20


def test_a_device_that_fails_at_opening_leaves_nothing_open(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(20))
    for operation in ("read_into", "open"):
        files = FaultyFiles()
        files.fail(operation, errno.EIO)
        with pytest.raises((OSError, ConfigError)):
            DiskStore(tmp_path, 4 * MIB, files=files)
    with opened(tmp_path) as store:
        assert len(read_rightly(store, space_of(store), range(20))) == 20


def _write_version(folder: Path, version: int) -> bytes:
    path = folder / RECORDS_NAME
    raw = path.read_bytes()
    raw = encode_header(Header(version, (len(raw) - HEADER_BYTES) // 256)) + raw[HEADER_BYTES:]
    path.write_bytes(raw)
    return raw


def test_a_newer_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(20))
    payloads = (tmp_path / DATA_NAME).read_bytes()
    raw = _write_version(tmp_path, 7)
    with pytest.raises(ConfigError, match=r"format version 7, which this kvtier does not know; use a newer kvtier or"):
        DiskStore(tmp_path, 4 * MIB)
    assert (tmp_path / RECORDS_NAME).read_bytes() == raw
    assert (tmp_path / DATA_NAME).read_bytes() == payloads
    assert sorted(os.listdir(tmp_path)) == [DATA_NAME, "lock", RECORDS_NAME]


def test_an_older_format_is_set_aside_with_a_sentence_and_counts_against_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 2 * MIB) as store:
        write(store, space_of(store), range(20))
    raw = _write_version(tmp_path, 0)
    with opened(tmp_path, 4 * MIB) as store:
        assert "had format version 0; set aside in version-0" in caplog.text
        assert (tmp_path / "version-0" / RECORDS_NAME).read_bytes() == raw
        assert (tmp_path / "version-0" / DATA_NAME).stat().st_size >= 20 * UNIT
        write(store, space_of(store), range(1000))
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 4 * MIB


def test_an_older_format_that_fills_the_budget_is_removed_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 4 * MIB) as store:
        write(store, space_of(store), range(1000))
    _write_version(tmp_path, 0)
    with opened(tmp_path, 4 * MIB) as store:
        assert "had format version 0, too large to keep; removed" in caplog.text
        write(store, space_of(store), range(500))
        assert len(read_rightly(store, space_of(store), range(500))) == 500


@pytest.mark.slow
def test_a_hundred_thousand_blocks_are_recovered_by_few_reads(tmp_path: Path) -> None:
    """The files are made here: records of blocks whose payloads were never written, and a few that were."""
    num_blocks = 100_000
    with (tmp_path / RECORDS_NAME).open("wb") as records, (tmp_path / DATA_NAME).open("wb") as payloads:
        records.write(encode_header(Header(1, num_blocks)))
        payloads.truncate(num_blocks * UNIT)
        for number in range(num_blocks):
            checksum = 1
            if number % 1000 == 0:
                bytes_of_it = payload(hash_of(number), UNIT)
                checksum = checksum_of(NAMESPACE, hash_of(number), memoryview(bytes_of_it))
                payloads.seek(number * UNIT)
                payloads.write(bytes_of_it)
            order = number + 1
            record = BlockRecord(NAMESPACE, hash_of(number), number, UNIT, 16, order, order, checksum, "a", False)
            records.write(encode_block(record, number))

    files = FaultyFiles()
    store = DiskStore(tmp_path, 1 << 30, files=files)
    num_reads = files.num_calls["read_into"]
    try:
        assert store.recovery.num_blocks == num_blocks
        space = space_of(store)
        assert read_rightly(store, space, range(0, num_blocks, 1000)) == set(range(0, num_blocks, 1000))
        assert store.losses == {}
        assert read(store, space, 1) is None, "payloads are verified on the first read"
        assert store.losses == {"corrupt": 1}
    finally:
        store.close()
    assert num_reads < num_blocks // 100


# --- a full or failing device ------------------------------------------------------------------------------------


def test_a_full_disk_is_a_smaller_budget_until_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    files = FaultyFiles()
    with opened(tmp_path, 8 * MIB, files) as store:
        space = space_of(store)
        write(store, space, range(100))
        files.fail("allocate", errno.ENOSPC)
        write(store, space, range(100, 700))
        assert caplog.text.count("the disk is full; continuing with") == 1
        assert store.levels()["evicted_blocks"] > 0
        assert read_rightly(store, space, range(600, 700)) == set(range(600, 700))
        files.heal()
        store.try_growing_again()
        evicted = store.levels()["evicted_blocks"]
        write(store, space, range(1000, 1500))
        assert store.levels()["evicted_blocks"] == evicted


def test_a_full_disk_at_the_first_block_is_no_room_not_a_crash(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, 8 * MIB, files) as store:
        files.fail("allocate", errno.ENOSPC)
        with pytest.raises(TierFull):
            write(store, space_of(store), [1])
        files.heal()
        store.try_growing_again()
        write(store, space_of(store), [1])
        assert read_rightly(store, space_of(store), range(2)) == {1}


@pytest.mark.parametrize("after", range(6))
def test_a_write_that_fails_stores_nothing_and_leaks_nothing(tmp_path: Path, after: int) -> None:
    files = FaultyFiles()
    with opened(tmp_path, MIB, files) as store:
        space = space_of(store, 2 * UNIT)
        write(store, space, range(150))
        used = store.levels()["used_bytes"]
        files.fail("write", errno.EIO, after=after, times=1)
        for number in range(1000, 1010):
            try:
                write(store, space, [number])
            except OSError:
                assert _there(store, space, range(number, number + 1)) == set()
                write(store, space, [number])
        assert store.levels()["used_bytes"] == used
        assert read_rightly(store, space, range(1000, 1010)) == set(range(1000, 1010))
        read_rightly(store, space, range(150))
        assert store.losses == {}
    with opened(tmp_path, MIB) as store:
        assert read_rightly(store, space_of(store, 2 * UNIT), range(1000, 1010)) == set(range(1000, 1010))
        assert store.losses == {}


def test_nothing_is_evicted_while_the_file_can_grow_whoever_takes_the_room_first(tmp_path: Path) -> None:
    """As when another thread takes the room that this one has made the file grow by."""
    with opened(tmp_path, 64 * MIB) as store:
        space = space_of(store, 64 * UNIT)
        while True:
            write(store, space, [len(space.index)])
            if not store._pool.has_room(64):
                break
        num_blocks = len(space.index)
        block_hash, number = hash_of(1000), store._free_records.popleft()
        bytes_of_it = memoryview(payload(block_hash, 64 * UNIT))
        assert store._write_part(space, [block_hash], [bytes_of_it], [1], [number]) == []
        assert len(space.index) == num_blocks
        assert store.levels()["evicted_blocks"] == 0
        write(store, space, [1000])
        assert len(read_rightly(store, space, [*range(num_blocks), 1000])) == num_blocks + 1


def test_threads_never_see_a_wrong_byte_and_never_exceed_the_bound(tmp_path: Path) -> None:
    failures: list[str] = []
    with opened(tmp_path, MIB) as store:
        spaces = [space_of(store), space_of(store, 3 * UNIT, OTHER_NAMESPACE)]

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(300):
                    space = rng.choice(spaces)
                    number = rng.randrange(300)
                    match rng.randrange(8):
                        case 0:
                            store.drop(space, [hash_of(number)])
                        case 1:
                            store.save_recency()
                        case 2:
                            store.verify(space, hash_of(number))
                        case 3 | 4:
                            read_rightly(store, space, [number])
                        case _:
                            write(store, space, [number])
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.losses == {}
        assert _size(tmp_path) <= MIB
        there = [read_rightly(store, space, range(300)) for space in spaces]
    with opened(tmp_path, MIB) as store:
        assert [
            read_rightly(store, space_of(store), range(300)),
            read_rightly(store, space_of(store, 3 * UNIT, OTHER_NAMESPACE), range(300)),
        ] == there
        assert store.losses == {}


# --- a smaller budget, and a crash meanwhile ---------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 5, 20, 100, 200, 300])
def test_a_crash_while_the_store_is_made_smaller_loses_only_what_had_to_go(tmp_path: Path, after: int) -> None:
    with opened(tmp_path, 6 * MIB) as store:
        write(store, space_of(store), range(700))
        write(store, space_of(store, 3 * UNIT, OTHER_NAMESPACE), range(150))
        store.pin(space_of(store), [hash_of(number) for number in range(20)])
    files = FaultyFiles()
    files.fail("write", errno.EIO, after=after)
    with contextlib.suppress(OSError):
        DiskStore(tmp_path, 2 * MIB, files=files).close()
    with opened(tmp_path, 2 * MIB) as store:
        assert _size(tmp_path) <= 2 * MIB
        assert read_rightly(store, space_of(store), range(20)) == set(range(20)), "pinned"
        others = read_rightly(store, space_of(store, 3 * UNIT, OTHER_NAMESPACE), range(150))
        assert len(others) > 110
        assert others == set(range(150 - len(others), 150)), "the coldest went"
        assert store.losses.keys() <= {"over the budget"}


def test_a_block_that_cannot_be_read_is_all_that_a_smaller_budget_loses_besides_the_coldest(tmp_path: Path) -> None:
    with opened(tmp_path, 6 * MIB) as store:
        write(store, space_of(store), range(1000))
    files = FaultyFiles()
    files.fail("read_into", errno.EIO, after=3, times=1)  # the headers and the records come first
    with opened(tmp_path, 2 * MIB, files) as store:
        assert store.losses["unreadable"] == 1
        there = read_rightly(store, space_of(store), range(1000))
        assert len(there) > 350
        assert len(set(range(1000 - len(there) - 1, 1000)) - there) == 1


def test_one_large_block_among_pinned_small_ones_is_refused_at_once(tmp_path: Path) -> None:
    with opened(tmp_path, 64 * MIB) as store:
        small = space_of(store)
        for first in range(0, 15_000, 500):
            hashes = [hash_of(number) for number in range(first, first + 500)]
            store.write(small, hashes, [memoryview(bytes(UNIT))] * 500)
        store.pin(small, [hash_of(number) for number in range(0, 15_000, 200)])
        large = space_of(store, 4 * MIB, OTHER_NAMESPACE)
        with pytest.raises(TierFull):
            write(store, large, [1])
