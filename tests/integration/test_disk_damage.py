"""A store whose file was damaged between runs: no wrong byte is ever returned, and each loss is counted by kind."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.stores.disk import DiskStore
from kvtier.stores.records import (
    HEADER_BYTES,
    MAX_COUNT,
    RECORD_BYTES,
    BlockRecord,
    decode_records,
    encode_block,
)
from tests.support.faulty_files import FaultyFiles
from tests.support.store_building import (
    DATA_NAME,
    MIB,
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
    start_of,
    write,
)

_BLOCK_BYTES = 4 * UNIT
_NUMBERS = range(200)
_OTHER_NUMBERS = range(1000, 1100)


def _flip_bits(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(rng.randrange(1, 200)):
            offset = rng.randrange(path.stat().st_size)
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _flip_bits_of_records(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(30):
            offset = HEADER_BYTES + rng.randrange(200 * RECORD_BYTES)
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _zero_ranges(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(rng.randrange(1, 20)):
            file.seek(rng.randrange(path.stat().st_size))
            file.write(bytes(rng.randrange(1, 20_000)))


def _swap_sectors(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(40):
            here, there = (rng.randrange(path.stat().st_size // UNIT) * UNIT for _ in range(2))
            _swap(file.fileno(), here, there, UNIT)


def _swap_everything(path: Path, rng: random.Random) -> None:
    """The header too."""
    with path.open("r+b") as file:
        units = list(range(path.stat().st_size // UNIT))
        rng.shuffle(units)
        raw = file.read()
        file.seek(0)
        file.write(b"".join(raw[unit * UNIT : (unit + 1) * UNIT] for unit in units))


def _fill_with_noise(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        nbytes = path.stat().st_size // 4
        file.seek(rng.randrange(path.stat().st_size - nbytes))
        file.write(rng.randbytes(nbytes))


def _copy_records_over_others(path: Path, rng: random.Random) -> None:
    """Whole, well-formed records in the wrong places: two for one key and room."""
    with path.open("r+b") as file:
        for _ in range(20):
            file.seek(HEADER_BYTES + rng.randrange(200) * RECORD_BYTES)
            record = file.read(RECORD_BYTES)
            file.seek(HEADER_BYTES + rng.randrange(200) * RECORD_BYTES)
            file.write(record)


def _grow(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(100_000)))


def _swap(fd: int, here: int, there: int, nbytes: int) -> None:
    first, second = os.pread(fd, nbytes, here), os.pread(fd, nbytes, there)
    os.pwrite(fd, second, here)
    os.pwrite(fd, first, there)


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def _empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


_OF_ANY: list[Callable[[Path, random.Random], None]] = [
    _flip_bits,
    _truncate,
    _zero_ranges,
    _swap_sectors,
    _swap_everything,
    _fill_with_noise,
    _grow,
    _remove,
    _empty,
]
_DAMAGES = [
    *((damage, name) for damage in _OF_ANY for name in (DATA_NAME, RECORDS_NAME)),
    (_flip_bits_of_records, RECORDS_NAME),
    (_copy_records_over_others, RECORDS_NAME),
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("damage", "name"), _DAMAGES, ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_")
)
def test_damage_costs_blocks_that_are_counted_and_never_a_wrong_byte(
    tmp_path: Path, damage: Callable[[Path, random.Random], None], name: str, seed: int
) -> None:
    with opened(tmp_path, 6 * MIB) as store:
        write(store, space_of(store, _BLOCK_BYTES), _NUMBERS)
        write(store, space_of(store, UNIT, OTHER_NAMESPACE), _OTHER_NUMBERS)
    damage(tmp_path / name, random.Random(seed))

    with opened(tmp_path, 6 * MIB) as store:
        missing = _num_missing(store)
        losses = dict(store.losses)
        # Of a record that was zeroed nobody can know that it was one, nor of those where the header should be.
        if not (damage is _zero_ranges and name == RECORDS_NAME) and "header" not in losses and missing < 300:
            assert missing <= sum(losses.values()), f"{missing} blocks are gone, but {losses} were counted"
        assert losses or not missing or (damage is _zero_ranges and name == RECORDS_NAME)
        write(store, space_of(store, _BLOCK_BYTES), range(5000, 5010))
        assert len(read_rightly(store, space_of(store, _BLOCK_BYTES), range(5000, 5010))) == 10
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * MIB

    with opened(tmp_path, 6 * MIB) as store:
        assert _num_missing(store) <= missing + 10, "what was whole once stays"
        assert len(read_rightly(store, space_of(store, _BLOCK_BYTES), range(5000, 5010))) == 10
        assert store.losses == {}, "what was lost once is not counted again"


def _num_missing(store: DiskStore) -> int:
    there = read_rightly(store, space_of(store, _BLOCK_BYTES), _NUMBERS)
    others = read_rightly(store, space_of(store, UNIT, OTHER_NAMESPACE), _OTHER_NUMBERS)
    return len(_NUMBERS) - len(there) + len(_OTHER_NUMBERS) - len(others)


def test_every_corrupt_block_is_counted_once_and_its_room_is_used_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store, _BLOCK_BYTES)
        write(store, space, range(50))
        starts = [start_of(store, space, number) for number in range(10)]
        used = store.levels()["used_bytes"]
    with (tmp_path / DATA_NAME).open("r+b") as file:
        for start in starts:
            file.seek(start + 5000)
            file.write(b"x")

    with opened(tmp_path) as store:
        space = space_of(store, _BLOCK_BYTES)
        assert store.recovery.num_blocks == 50, "payloads are read when they are needed"
        assert read_rightly(store, space, range(50)) == set(range(10, 50))
        assert store.losses == {"corrupt": 10}
        assert read_rightly(store, space, range(50)) == set(range(10, 50))
        assert store.losses == {"corrupt": 10}
        write(store, space, range(10))
        assert store.levels()["used_bytes"] == used
        assert read_rightly(store, space, range(50)) == set(range(50))


def test_two_blocks_that_changed_places_are_both_lost(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store, _BLOCK_BYTES)
        write(store, space, range(20))
        here, there = start_of(store, space, 3), start_of(store, space, 7)
    with (tmp_path / DATA_NAME).open("r+b") as file:
        _swap(file.fileno(), here, there, _BLOCK_BYTES)

    with opened(tmp_path) as store:
        assert read_rightly(store, space_of(store, _BLOCK_BYTES), range(20)) == set(range(20)) - {3, 7}
        assert store.losses == {"corrupt": 2}


def test_every_block_beyond_the_end_of_a_truncated_file_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store, _BLOCK_BYTES)
        write(store, space, range(100))
        ends = {number: start_of(store, space, number) + _BLOCK_BYTES for number in range(100)}
    size = sorted(ends.values())[59]
    os.truncate(tmp_path / DATA_NAME, size)

    with opened(tmp_path) as store:
        assert store.losses == {"truncated": 40}
        there = read_rightly(store, space_of(store, _BLOCK_BYTES), range(100))
        assert there == {number for number, end in ends.items() if end <= size}


def test_a_damaged_header_loses_nothing(tmp_path: Path) -> None:
    """Records stand on their own."""
    with opened(tmp_path) as store:
        write(store, space_of(store), range(300))
    for damage in (b"damage", bytes(HEADER_BYTES)):
        with (tmp_path / RECORDS_NAME).open("r+b") as file:
            file.write(damage)
        with opened(tmp_path) as store:
            assert read_rightly(store, space_of(store), range(300)) == set(range(300))
            assert store.losses == {"header": 1}


@pytest.mark.parametrize("num_left", [0, 1, 100, 255])
def test_records_that_were_cut_off_are_counted(tmp_path: Path, num_left: int) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(200))
    num_records = ((tmp_path / RECORDS_NAME).stat().st_size - HEADER_BYTES) // RECORD_BYTES
    os.truncate(tmp_path / RECORDS_NAME, HEADER_BYTES + num_left * RECORD_BYTES + 100)

    with opened(tmp_path) as store:
        assert store.losses == {"truncated records": num_records - num_left}
        assert len(read_rightly(store, space_of(store), range(200))) == min(num_left, 200)
        write(store, space_of(store), range(200))
        assert read_rightly(store, space_of(store), range(200)) == set(range(200))


def test_payloads_without_records_are_an_empty_store_that_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(50))
    (tmp_path / RECORDS_NAME).unlink()

    with opened(tmp_path) as store:
        assert store.losses == {"truncated records": 1}
        assert read_rightly(store, space_of(store), range(50)) == set()
        write(store, space_of(store), range(50))
        assert read_rightly(store, space_of(store), range(50)) == set(range(50))


@pytest.mark.parametrize("names", [(DATA_NAME,), (RECORDS_NAME,), (DATA_NAME, RECORDS_NAME)], ids="+".join)
def test_another_stores_files_bring_that_stores_blocks_or_none(tmp_path: Path, names: tuple[str, ...]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with opened(here) as store:
        write(store, space_of(store, _BLOCK_BYTES), range(50))
    with opened(there) as store:
        write(store, space_of(store, _BLOCK_BYTES), range(40, 90))
    for name in names:
        os.rename(here / name, tmp_path / "passing")
        os.rename(there / name, here / name)
        os.rename(tmp_path / "passing", there / name)

    is_whole = len(names) == 2
    with opened(here) as store:
        there_now = read_rightly(store, space_of(store, _BLOCK_BYTES), range(90))
        assert there_now == (set(range(40, 90)) if is_whole else set())
    with opened(there) as store:
        there_now = read_rightly(store, space_of(store, _BLOCK_BYTES), range(90))
        assert there_now == (set(range(50)) if is_whole else set())
        assert sum(store.losses.values()) == (0 if is_whole else 50)


def test_another_models_file_with_blocks_of_another_size_is_no_danger(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with opened(here) as store:
        write(store, space_of(store, _BLOCK_BYTES), range(50))
    with opened(there) as store:
        write(store, space_of(store, UNIT, OTHER_NAMESPACE), range(50))
    for name in (DATA_NAME, RECORDS_NAME):
        os.replace(there / name, here / name)

    with opened(here) as store:
        space = space_of(store, _BLOCK_BYTES)
        assert read_rightly(store, space, range(50)) == set()
        write(store, space, range(50))
        assert read_rightly(store, space, range(50)) == set(range(50))


def test_a_deleted_file_is_an_empty_store(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(50))
    (tmp_path / DATA_NAME).unlink()
    (tmp_path / RECORDS_NAME).unlink()

    with opened(tmp_path) as store:
        assert store.recovery.num_blocks == 0
        assert store.losses == {}
        assert read_rightly(store, space_of(store), range(50)) == set()
        write(store, space_of(store), range(50))
        assert len(read_rightly(store, space_of(store), range(50))) == 50


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("torn_bytes", [0, 512, 4096, 4096 + 512, _BLOCK_BYTES - 512, _BLOCK_BYTES])
@pytest.mark.parametrize("after", range(4))
def test_a_torn_write_costs_at_most_the_block_it_was_for(tmp_path: Path, after: int, torn_bytes: int) -> None:
    """The first writes of a `write` into a full store are the wipe of what it evicts, its payload and its record."""
    files = FaultyFiles()
    folder = tmp_path / "store"
    with opened(folder, MIB, files) as store:
        space = space_of(store, _BLOCK_BYTES)
        write(store, space, range(100))
        before = {number for number in range(100) if store.contains(space, [hash_of(number)])[0]}
        assert len(before) < 100, "it must be full, so that room is taken from others"
        files.tear(torn_bytes, errno.EIO, after=after)
        written = set()
        for number in range(200, 204):
            try:
                write(store, space, [number])
                written.add(number)
            except OSError:
                break
        assert len(written) < 4
        left = crashed(folder, tmp_path / "left")

    with opened(left, MIB) as store:
        there = read_rightly(store, space_of(store, _BLOCK_BYTES), [*range(100), *range(200, 204)])
        assert written <= there
        assert len(before - there) <= len(written) + 1
        assert store.losses.keys() <= {"damaged record"}, "what was not written whole has no record"


@pytest.mark.parametrize("torn_bytes", range(0, 256, 32))
def test_a_torn_record_is_counted_and_its_neighbours_stay(tmp_path: Path, torn_bytes: int) -> None:
    files = FaultyFiles()
    folder = tmp_path / "store"
    with opened(folder, files=files) as store:
        space = space_of(store)
        write(store, space, range(20))
        files.tear(torn_bytes, errno.EIO, after=1)
        with pytest.raises(OSError, match="Input/output"):
            write(store, space, [20])
        left = crashed(folder, tmp_path / "left")

    with opened(left) as store:
        assert read_rightly(store, space_of(store), range(21)) == set(range(20))
        assert store.losses == ({"damaged record": 1} if torn_bytes else {})


def test_a_record_that_reached_the_disk_before_its_payload_is_a_counted_loss(tmp_path: Path) -> None:
    """Like a power cut without fsync: some of the payload's sectors are old."""
    with opened(tmp_path) as store:
        space = space_of(store, _BLOCK_BYTES)
        write(store, space, range(20))
        starts = {number: start_of(store, space, number) for number in range(20)}
    with (tmp_path / DATA_NAME).open("r+b") as file:
        for number in range(0, 20, 2):
            file.seek(starts[number] + 512 * number)
            file.write(bytes(512))

    with opened(tmp_path) as store:
        assert read_rightly(store, space_of(store, _BLOCK_BYTES), range(20)) == set(range(1, 20, 2))
        assert store.losses == {"corrupt": 10}


def test_a_block_that_cannot_be_read_is_counted_as_that(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as store:
        space = space_of(store)
        write(store, space, range(3))
        files.fail("read_into", errno.EIO, times=1)
        assert read(store, space, 0) is None
        assert store.losses == {"unreadable": 1}
        assert read(store, space, 0) is None
        assert read_rightly(store, space, range(3)) == {1, 2}
        assert payload(hash_of(1), UNIT) == read(store, space, 1)


def _rewrite_record(folder: Path, number: int, **fields: int | bool) -> None:
    """A record as its writer could have written it, checksum and all, with other numbers in it."""
    with (folder / RECORDS_NAME).open("r+b") as file:
        raw = file.read()[HEADER_BYTES:]
        record = list(decode_records(memoryview(raw)))[number]
        assert isinstance(record, BlockRecord)
        file.seek(HEADER_BYTES + number * RECORD_BYTES)
        file.write(encode_block(record._replace(**fields), number))


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence": 2**64 - 1},
        {"sequence": MAX_COUNT},
        {"used_at": 2**64 - 1},
        {"used_at": MAX_COUNT},
        {"start": 2**64 - 1},
        {"start": 2**51},
        {"block_bytes": 2**64 - 1},
        {"block_bytes": 2**40},
        {"block_tokens": 0},
        {"block_tokens": 2**32 - 1},
    ],
    ids=str,
)
def test_whatever_a_record_says_the_store_goes_on_writing_and_reads_rightly(
    tmp_path: Path, fields: dict[str, int]
) -> None:
    with opened(tmp_path) as store:
        write(store, space_of(store), range(5))
    _rewrite_record(tmp_path, 2, **fields)
    for first in (100, 200):  # what is written beside such a record is there when the folder is opened again
        with opened(tmp_path) as store:
            space = space_of(store)
            write(store, space, range(first, first + 5))
            assert len(read_rightly(store, space, range(5))) >= 4
    with opened(tmp_path) as store:
        there = read_rightly(store, space_of(store), range(300))
        assert {*range(100, 105), *range(200, 205)} <= there


def test_a_record_file_made_huge_costs_neither_memory_nor_blocks(tmp_path: Path) -> None:
    with opened(tmp_path, 1 << 30) as store:
        write(store, space_of(store), range(5))
    os.truncate(tmp_path / RECORDS_NAME, 512 * MIB)
    with opened(tmp_path, 1 << 30) as store:
        assert read_rightly(store, space_of(store), range(5)) == set(range(5))
        write(store, space_of(store), range(5, 10))
    assert (tmp_path / RECORDS_NAME).stat().st_size < 4 * MIB
    with opened(tmp_path, 1 << 30) as store:
        assert read_rightly(store, space_of(store), range(10)) == set(range(10))
