"""What the file cache removes, and when, one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.vineyard.chunk_files import Damage
from kvtier.vineyard.file_cache import FileCache
from tests.support.vineyard_files import (
    CHUNK,
    FILE_BYTES,
    TEMP,
    TENSOR_BYTES,
    TOKENS,
    chunk_paths,
    found,
    make_older,
    open_files,
    store,
)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[FileCache]:
    with closing(open_files(tmp_path)) as cache:
        yield cache


def test_the_capacity_holds_over_files_that_others_wrote(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as other:
        for number in range(20):
            store(other, [number] * CHUNK)
    with closing(open_files(tmp_path, capacity=5 * CHUNK + 3)) as cache:
        for number in range(100, 103):
            assert store(cache, [number] * CHUNK) == CHUNK
            assert len(chunk_paths(tmp_path)) <= 5
        assert [found(cache, [number] * CHUNK) for number in range(100, 103)] == [CHUNK] * 3


def test_a_bound_is_for_chunks_of_its_own_shape(tmp_path: Path) -> None:
    large_bytes = 65536
    with (
        closing(open_files(tmp_path, capacity=400, tensor_bytes=large_bytes)) as large,
        closing(open_files(tmp_path, capacity=400)) as small,
    ):
        assert store(large, TOKENS, nbytes=large_bytes) == len(TOKENS)
        assert store(small, range(40)) == 40
        for number in range(1000, 1120):
            assert store(small, [number] * CHUNK) == CHUNK
        small.collect()

        assert found(large, TOKENS, large_bytes) == len(TOKENS)
        assert sum(path.stat().st_size == FILE_BYTES for path in chunk_paths(tmp_path)) <= 100
        assert small.stats()["evicted_chunks"] >= 30
        assert large.stats()["evicted_chunks"] == 0


def test_of_the_bounds_of_open_caches_the_largest_holds(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, capacity=2 * CHUNK)) as small:
        with closing(open_files(tmp_path, capacity=100_000)) as large:
            assert store(large, range(20 * CHUNK)) == 20 * CHUNK
            assert store(small, TOKENS) == len(TOKENS)
            small.collect()
            assert found(large, range(20 * CHUNK)) == 20 * CHUNK
            assert small.stats()["evicted_chunks"] == 0

        assert store(small, [5] * CHUNK) == CHUNK
        assert len(chunk_paths(tmp_path)) == 2, "its own, once it is the only one"


def test_chunks_for_which_there_is_no_room_are_counted(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, capacity=3 * CHUNK)) as cache:
        store(cache, TOKENS)

        assert cache.stats()["no_room_chunks"] == cache.stats()["refused_chunks"] == 1


def test_the_coldest_go_first_and_a_query_is_a_use(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, capacity=3 * CHUNK)) as cache:
        for number in range(3):
            store(cache, [number] * CHUNK)
            for path in chunk_paths(tmp_path):
                make_older(path, 100)
        assert found(cache, [0] * CHUNK) == CHUNK

        store(cache, [7] * CHUNK)

        assert [found(cache, [number] * CHUNK) for number in (0, 1, 2, 7)] == [CHUNK, 0, CHUNK, CHUNK]
        assert cache.stats()["evicted_chunks"] == 1


def test_recency_does_not_hang_on_access_times(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as cache:
        store(cache, TOKENS)
        for path in chunk_paths(tmp_path):
            make_older(path, 1000)
        found(cache, TOKENS[: 2 * CHUNK])

        ages = [path.stat().st_mtime for path in chunk_paths(tmp_path)]
        assert min(ages[:2]) > max(ages[2:]) + 900


def test_a_prompts_end_goes_before_its_beginning(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, capacity=4 * CHUNK)) as cache:
        store(cache, TOKENS)
        at = os.stat(chunk_paths(tmp_path)[0]).st_mtime
        for path in chunk_paths(tmp_path):
            os.utime(path, (at, at - 100))

        store(cache, [1] * CHUNK)

        assert found(cache, TOKENS) == 3 * CHUNK


def test_a_sequence_longer_than_the_capacity_keeps_its_beginning(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, capacity=3 * CHUNK)) as cache:
        assert store(cache, TOKENS) == 3 * CHUNK
        assert found(cache, TOKENS) == 3 * CHUNK
        assert store(cache, TOKENS[3 * CHUNK :], TOKENS[: 3 * CHUNK]) == 0
        assert found(cache, TOKENS) == 3 * CHUNK


def test_what_this_client_used_goes_when_nobody_has_used_it_for_the_ttl(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as other:
        store(other, [5] * CHUNK)
    with closing(open_files(tmp_path, ttl=100)) as cache:
        store(cache, TOKENS)
        for path in chunk_paths(tmp_path):
            make_older(path, 101)
        found(cache, TOKENS[:CHUNK])

        cache.collect()

        assert found(cache, TOKENS) == CHUNK
        assert found(cache, [5] * CHUNK) == CHUNK, "another client's"
        assert cache.stats()["expired_chunks"] == 3


def test_the_global_ttl_is_for_everybodys_chunks(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as other:
        store(other, TOKENS)
        store(other, [5] * CHUNK)
    for path in chunk_paths(tmp_path)[1:]:
        make_older(path, 201)
    with closing(open_files(tmp_path, enable_global_gc=True, global_ttl=200)) as cache:
        cache.collect()

        assert cache.stats()["expired_chunks"] == 4
        assert len(chunk_paths(tmp_path)) == 1


def test_without_global_gc_others_chunks_stay_however_old(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as other:
        store(other, TOKENS)
    for path in chunk_paths(tmp_path):
        make_older(path, 1e6)
    with closing(open_files(tmp_path)) as cache:
        cache.collect()

        assert found(cache, TOKENS) == len(TOKENS)


def test_temporary_files_go_when_their_writer_is_dead_or_silent_for_long(tmp_path: Path) -> None:
    temp = tmp_path / TEMP
    temp.mkdir()
    dead = temp / "0123456789ab.1.1.00000000-0.tmp"
    alive_elsewhere = temp / "0123456789ab.1.1.00000001-0.tmp"
    slow = temp / "0123456789ab.1.1.00000002-0.tmp"
    sign_of_life = temp / "0123456789ab.1.1.00000002-123-456.room"
    foreign = temp / "somebody's"
    for path in (dead, alive_elsewhere, slow, sign_of_life, foreign):
        path.write_bytes(b"half a chunk")
    for path in (dead, slow, foreign):
        make_older(path, 61)
    make_older(alive_elsewhere, 50)
    with closing(open_files(tmp_path)) as cache:
        cache.collect()

        assert (dead.exists(), foreign.exists()) == (False, True)
        assert (alive_elsewhere.exists(), slow.exists(), sign_of_life.exists()) == (True, True, True)
        assert cache.stats()["stale_temps"] == 1


def test_what_another_writer_has_announced_counts_until_it_is_dead(tmp_path: Path) -> None:
    (tmp_path / TEMP).mkdir()
    announced = tmp_path / TEMP / f"0123456789ab.1.1.00000000-{FILE_BYTES}-0.room"
    announced.touch()
    os.truncate(announced, 3 * FILE_BYTES)
    with closing(open_files(tmp_path, capacity=4 * CHUNK)) as cache:
        assert store(cache, TOKENS) == CHUNK
        make_older(announced, 61)
        assert store(cache, TOKENS) == len(TOKENS)


@pytest.mark.parametrize(
    ("shape", "tensor_bytes"),
    [
        pytest.param({"split_number": 3}, TENSOR_BYTES, id="split_number"),
        pytest.param({"split_number": 8}, TENSOR_BYTES, id="a folder for each"),
        pytest.param({"chunk_size": CHUNK // 2}, TENSOR_BYTES, id="chunk_size"),
        pytest.param({"chunk_size": 2 * CHUNK}, TENSOR_BYTES, id="larger chunk_size"),
        pytest.param({}, TENSOR_BYTES + 8, id="tensor_bytes"),
        pytest.param({"chunk_size": CHUNK // 2}, 2 * TENSOR_BYTES, id="chunks of as many bytes"),
    ],
)
def test_clients_that_disagree_about_the_shape_miss_and_both_store_their_own(
    cache: FileCache, tmp_path: Path, shape: dict[str, object], tensor_bytes: int
) -> None:
    store(cache, TOKENS)
    with closing(open_files(tmp_path, tensor_bytes=tensor_bytes, **shape)) as other:  # type: ignore[arg-type]
        assert found(other, TOKENS, tensor_bytes) == 0
        assert store(other, TOKENS[2 * CHUNK :], TOKENS[: 2 * CHUNK], tensor_bytes) == 0, "not its prefix"
        assert store(other, TOKENS, nbytes=tensor_bytes) == len(TOKENS)
        other.collect()

        assert found(other, TOKENS, tensor_bytes) == len(TOKENS)
        assert found(cache, TOKENS) == len(TOKENS)
        assert not any(cache.stats().get(f"{damage.value}_files", 0) for damage in Damage)


def test_a_root_that_is_made_is_for_its_owner_alone_and_one_that_is_there_stays(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o750)
    new = tmp_path / "between" / "new"
    for root, mode in ((there, 0o750), (new, 0o700)):
        with closing(open_files(root)) as cache:
            store(cache, TOKENS)
            assert root.stat().st_mode & 0o777 == mode
            assert {path.stat().st_mode & 0o777 for path in root.iterdir()} == {0o700}
            shutil.rmtree(root)
            store(cache, TOKENS)
            assert root.stat().st_mode & 0o777 == 0o700


def test_files_are_for_their_owner_alone(cache: FileCache, tmp_path: Path) -> None:
    store(cache, TOKENS)

    assert {path.stat().st_mode & 0o777 for path in chunk_paths(tmp_path)} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in chunk_paths(tmp_path)} == {0o700}
