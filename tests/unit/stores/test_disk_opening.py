"""A disk store's folder is opened: in use, of another format, of another budget, after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierFull
from kvtier.memory.checksum import checksum_of
from kvtier.stores.disk import DiskStore
from kvtier.stores.records import HEADER_BYTES, BlockRecord, Header, encode_block, encode_header
from tests.support.faulty_files import FaultyFiles
from tests.support.store_building import (
    DATA_NAME,
    MIB,
    NAMESPACE,
    OTHER_NAMESPACE,
    RECORDS_NAME,
    UNIT,
    hash_of,
    opened,
    payload,
    read,
    read_rightly,
    size_of,
    space_of,
    write,
)

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
        assert size_of(tmp_path) <= 2 * MIB
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
