"""Files that are damaged, unreadable or cannot be written are misses of the file cache, one process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.vineyard.file_cache import FileCache
from tests.support.faulty_files import FaultyFiles
from tests.support.vineyard_files import (
    CHUNK,
    FILE_BYTES,
    LAYERS,
    TENSOR_BYTES,
    TOKENS,
    chunk_paths,
    found,
    make_older,
    open_files,
    store,
    temp_names,
)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[FileCache]:
    with closing(open_files(tmp_path)) as cache:
        yield cache


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    return flip


def _replace(path: Path) -> None:
    path.write_bytes(os.urandom(FILE_BYTES))


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        pytest.param(_truncate, "wrong_size", id="truncated"),
        pytest.param(_empty, "empty", id="empty"),
        pytest.param(_lengthen, "wrong_size", id="longer"),
        pytest.param(_flip(4096), "corrupt", id="first byte of the payload"),
        pytest.param(_flip(4096 + CHUNK * LAYERS * 2 * TENSOR_BYTES - 1), "corrupt", id="last byte of the payload"),
        pytest.param(_flip(20), "corrupt", id="name"),
        pytest.param(_flip(50), "corrupt", id="checksum"),
        pytest.param(_replace, "corrupt", id="other bytes"),
    ],
)
def test_a_damaged_file_is_a_counted_miss_removed_and_stored_anew(
    cache: FileCache, tmp_path: Path, damage: Callable[[Path], None], kind: str
) -> None:
    store(cache, TOKENS)
    path = chunk_paths(tmp_path)[2]
    damage(path)

    assert found(cache, TOKENS) == 2 * CHUNK

    assert cache.stats()[f"{kind}_files"] == 1
    assert not path.exists()
    assert store(cache, TOKENS) == len(TOKENS)
    assert found(cache, TOKENS) == len(TOKENS)


def test_the_right_bytes_under_another_name_are_a_miss(cache: FileCache, tmp_path: Path) -> None:
    store(cache, TOKENS)
    first, second, *_ = chunk_paths(tmp_path)
    shutil.copy(first, second)

    assert found(cache, TOKENS) == CHUNK
    assert cache.stats()["corrupt_files"] == 1


def test_an_update_replaces_a_file_of_the_wrong_size(cache: FileCache, tmp_path: Path) -> None:
    store(cache, TOKENS)
    _empty(chunk_paths(tmp_path)[1])

    assert store(cache, TOKENS) == len(TOKENS)
    assert found(cache, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_in_a_chunks_place_is_a_miss_and_left_alone(
    cache: FileCache, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store(cache, TOKENS)
    path = chunk_paths(tmp_path)[1]
    path.unlink()
    make(path)

    assert found(cache, TOKENS) == CHUNK
    assert path.exists()
    assert sum(cache.stats().get(f"{kind}_files", 0) for kind in ("foreign", "unreadable")) == 1


def test_foreign_files_are_never_touched_nor_counted(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, capacity=2 * CHUNK, enable_global_gc=True)) as cache:
        store(cache, TOKENS[:CHUNK])
        folder = chunk_paths(tmp_path)[0].parent
        foreign = [
            tmp_path / "README",
            tmp_path / "notes" / "a",
            folder / "core",
            folder / "0f-3",
            tmp_path / "ab" / "x",
        ]
        for path in foreign:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(100_000))
            make_older(path, 1e7)
        store(cache, TOKENS[: 2 * CHUNK])
        cache.collect()

        assert all(path.stat().st_size == 100_000 for path in foreign)
        assert found(cache, TOKENS) == 2 * CHUNK


@pytest.mark.parametrize("operation", ["open", "read_into"])
def test_reads_that_fail_are_misses_and_the_file_stays(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS)
        files.fail(operation, errno.EIO)

        assert found(cache, TOKENS) == 0

        files.heal()
        assert found(cache, TOKENS) == len(TOKENS)
        assert cache.stats()["unreadable_files"] >= 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_chunk_that_cannot_be_read_is_stored_anew(tmp_path: Path, number: int) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS)
        first = chunk_paths(tmp_path)[0]
        before = first.stat().st_ino
        files.fail("read_into", number)
        assert found(cache, TOKENS) == 0

        assert store(cache, [7] * CHUNK, TOKENS[:CHUNK]) == 0, "behind what is not there"
        assert store(cache, TOKENS) == len(TOKENS)

        assert first.stat().st_ino != before
        assert store(cache, [7] * CHUNK, TOKENS[:CHUNK]) == CHUNK
        files.heal()
        assert found(cache, TOKENS) == len(TOKENS)


def test_unreadable_chunks_of_a_sequence_that_fills_the_capacity_are_stored_anew(tmp_path: Path) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files, capacity=len(TOKENS))) as cache:
        assert store(cache, TOKENS) == len(TOKENS)
        files.fail("read_into", errno.EIO)
        assert found(cache, TOKENS) == 0
        files.heal()

        for _ in range(len(TOKENS) // CHUNK):
            store(cache, TOKENS)
        assert cache.stats()["no_room_chunks"] == 0
        assert found(cache, TOKENS) == len(TOKENS)


def test_a_chunk_that_can_neither_be_read_nor_replaced_does_not_count(tmp_path: Path) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS)
        files.fail("read_into", errno.EIO)
        files.fail("write", errno.EIO)

        assert found(cache, TOKENS) == 0
        assert store(cache, TOKENS) == 0

        files.heal()
        assert found(cache, TOKENS) == len(TOKENS)
        num_stored = cache.stats()["stored_chunks"]
        assert store(cache, TOKENS) == len(TOKENS)
        assert cache.stats()["stored_chunks"] == num_stored, "it can be read again"


def test_a_chunk_that_may_be_read_again_counts_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS)
        first = chunk_paths(tmp_path)[0]
        first.chmod(0)
        files.fail("open", errno.EACCES)
        assert found(cache, TOKENS) == 0
        assert store(cache, TOKENS) == 0

        first.chmod(0o600)
        assert store(cache, TOKENS[:CHUNK]) == CHUNK


def test_too_many_open_files_say_nothing_about_a_chunk(tmp_path: Path) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS)
        files.fail("open", errno.EMFILE)

        assert found(cache, TOKENS) == 0
        assert store(cache, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("operation", ["open", "write", "sync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_writes_that_fail_are_a_short_count_and_leave_nothing(tmp_path: Path, operation: str, number: int) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS[:CHUNK])
        files.fail(operation, number)

        assert store(cache, TOKENS) == CHUNK
        assert temp_names(tmp_path) == []
        assert cache.stats()["write_failures"] == 1

        files.heal()
        assert found(cache, TOKENS) == CHUNK
        assert store(cache, TOKENS) == len(TOKENS)


def test_a_torn_write_is_never_seen(tmp_path: Path) -> None:
    files = FaultyFiles()
    with closing(open_files(tmp_path, files=files)) as cache:
        files.tear(5000, errno.ENOSPC, after=1)

        stored = store(cache, TOKENS)

        assert stored < len(TOKENS)
        assert found(cache, TOKENS) == stored
        assert temp_names(tmp_path) == []


def test_a_full_disk_at_the_start_is_an_error(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("write", errno.ENOSPC)

    with pytest.raises(ConfigError, match="cannot be used: No space left on device"):
        open_files(tmp_path, files=files)
    assert temp_names(tmp_path) == []


def test_a_folder_that_is_removed_under_the_cache_is_made_again(cache: FileCache, tmp_path: Path) -> None:
    store(cache, TOKENS)
    shutil.rmtree(tmp_path)

    assert found(cache, TOKENS) == 0
    assert store(cache, TOKENS) == len(TOKENS)
    assert found(cache, TOKENS) == len(TOKENS)
