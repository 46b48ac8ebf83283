"""The disk store on a device that is full or fails, and under many threads."""

from __future__ import annotations

import errno
import logging
import random
import threading
from pathlib import Path

import pytest

from kvtier.errors import TierFull
from tests.support.faulty_files import FaultyFiles
from tests.support.store_building import (
    MIB,
    OTHER_NAMESPACE,
    UNIT,
    hash_of,
    opened,
    payload,
    read_rightly,
    size_of,
    space_of,
    stored_among,
    write,
)


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
                assert stored_among(store, space, range(number, number + 1)) == set()
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
        block_hash, number = hash_of(1000), store._room._free_records.popleft()
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
        assert size_of(tmp_path) <= MIB
        there = [read_rightly(store, space, range(300)) for space in spaces]
    with opened(tmp_path, MIB) as store:
        assert [
            read_rightly(store, space_of(store), range(300)),
            read_rightly(store, space_of(store, 3 * UNIT, OTHER_NAMESPACE), range(300)),
        ] == there
        assert store.losses == {}
