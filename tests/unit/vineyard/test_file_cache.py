"""What the file cache stores, finds, refuses and removes, one process."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.vineyard import KVTensor
from kvtier.vineyard.chunk_files import ChunkFiles, ChunkName, ChunkWriter, Damage
from kvtier.vineyard.file_cache import FileCache
from tests.support.faulty_files import FaultyFiles
from tests.support.vineyard_files import (
    CHUNK,
    FILE_BYTES,
    LAYERS,
    TEMP,
    TENSOR_BYTES,
    Tensors,
    chunk_paths,
    found,
    make_older,
    open_files,
    store,
    temp_names,
)

TOKENS = list(range(100, 100 + 4 * CHUNK))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[FileCache]:
    with closing(open_files(tmp_path)) as cache:
        yield cache


def test_what_was_stored_is_found_with_every_byte(cache: FileCache) -> None:
    assert store(cache, TOKENS) == len(TOKENS)
    assert found(cache, TOKENS) == len(TOKENS)


class _CountingHold:
    """A hold on memory of another cache that says when it is looked at."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_entered = 0
        self.num_left = 0

    def enter(self) -> bool:
        self.num_entered += 1
        return True

    def leave(self) -> None:
        self.num_left += 1


def test_tensors_of_another_cache_are_held_until_they_are_written(
    cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = Tensors(len(TOKENS)).fill([], TOKENS)
    hold = _CountingHold()
    for of_token in tensors:
        for pair in of_token:
            for tensor in pair:
                tensor._hold = hold
    lefts_while_writing: list[int] = []
    finish = ChunkWriter.finish

    def finish_and_look(writer: ChunkWriter, *given: Any) -> Any:
        try:
            return finish(writer, *given)
        finally:
            lefts_while_writing.append(hold.num_left)

    monkeypatch.setattr(ChunkWriter, "finish", finish_and_look)

    assert cache.update([], TOKENS, tensors) == len(TOKENS)
    assert set(lefts_while_writing) == {0}
    assert hold.num_entered == hold.num_left > 0
    assert found(cache, TOKENS) == len(TOKENS)


def test_another_cache_of_the_folder_finds_it_after_the_first_has_gone(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as first:
        store(first, TOKENS)
    with closing(open_files(tmp_path)) as second:
        assert found(second, TOKENS) == len(TOKENS)
    with closing(open_files(tmp_path, tensor_bytes=64)) as other_shape:
        assert found(other_shape, TOKENS, 64) == 0


def test_a_query_finds_the_leading_chunks_that_are_there(cache: FileCache) -> None:
    store(cache, TOKENS)

    assert found(cache, [*TOKENS, 1, 2, 3, 4]) == len(TOKENS)
    assert found(cache, [*TOKENS[: 2 * CHUNK], 9, *TOKENS[2 * CHUNK :]]) == 2 * CHUNK
    assert found(cache, TOKENS[: CHUNK + 1]) == CHUNK
    assert found(cache, [1, *TOKENS]) == 0
    assert found(cache, []) == 0


def test_a_trailing_partial_chunk_is_not_stored(cache: FileCache) -> None:
    assert store(cache, TOKENS[: CHUNK + 3]) == CHUNK
    assert found(cache, TOKENS[: CHUNK + 3]) == CHUNK
    assert store(cache, TOKENS[:3]) == 0


def test_tokens_that_are_there_count_and_are_not_written_again(cache: FileCache, tmp_path: Path) -> None:
    store(cache, TOKENS[: 2 * CHUNK])
    before = [path.stat().st_ino for path in chunk_paths(tmp_path)]

    assert store(cache, TOKENS) == len(TOKENS)

    assert [path.stat().st_ino for path in chunk_paths(tmp_path)][:2] == before
    assert cache.stats()["stored_chunks"] == 4


def test_an_update_behind_a_prefix_extends_it(cache: FileCache) -> None:
    for first in range(0, len(TOKENS), CHUNK):
        assert store(cache, TOKENS[first : first + CHUNK], TOKENS[:first]) == CHUNK

    assert found(cache, TOKENS) == len(TOKENS)


def test_an_update_behind_a_missing_prefix_stores_nothing(cache: FileCache, tmp_path: Path) -> None:
    assert store(cache, TOKENS[CHUNK:], TOKENS[:CHUNK]) == 0
    assert chunk_paths(tmp_path) == []


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_any_missing_chunk_makes_a_prefix_missing(tmp_path: Path, missing: int) -> None:
    with closing(open_files(tmp_path)) as writer:
        store(writer, TOKENS[: 3 * CHUNK])
    chunk_paths(tmp_path)[missing].unlink()
    with closing(open_files(tmp_path)) as cache:
        assert store(cache, TOKENS[3 * CHUNK :], TOKENS[: 3 * CHUNK]) == 0


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_prefix_that_was_just_stored_is_missing_once_a_chunk_of_it_is_gone(
    cache: FileCache, tmp_path: Path, missing: int
) -> None:
    for first in range(0, 3 * CHUNK, CHUNK):
        store(cache, TOKENS[first : first + CHUNK], TOKENS[:first])
    chunk_paths(tmp_path)[missing].unlink()

    assert store(cache, TOKENS[3 * CHUNK :], TOKENS[: 3 * CHUNK]) == 0
    assert len(chunk_paths(tmp_path)) == 2


LONG = list(range(200 * CHUNK))
"""More chunks than every update looks at."""


def _stored_long(cache: FileCache) -> list[int]:
    """As by one who stores chunk by chunk, so that what is returned was seen a moment ago."""
    store(cache, LONG)
    assert store(cache, [1] * CHUNK, LONG) == CHUNK
    assert store(cache, [2] * CHUNK, [*LONG, *[1] * CHUNK]) == CHUNK
    return [*LONG, *[1] * CHUNK, *[2] * CHUNK]


def test_a_long_prefix_that_lost_a_chunk_is_missing_after_a_moment(cache: FileCache, tmp_path: Path) -> None:
    prefix = _stored_long(cache)
    chunk_paths(tmp_path)[100].unlink()

    while store(cache, [3] * CHUNK, prefix):
        prefix += [3] * CHUNK
    assert store(cache, [4] * CHUNK, prefix) == 0


def test_a_long_prefix_of_which_this_cache_removed_a_chunk_is_missing_at_once(cache: FileCache, tmp_path: Path) -> None:
    _stored_long(cache)
    path = chunk_paths(tmp_path)[100]
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"noise")
    chunks = cache._names.continued(LONG, [])
    chunks.trusted_until = float("inf")
    cache._names.remember(chunks)

    assert found(cache, LONG) == 100 * CHUNK
    assert store(cache, [3] * CHUNK, LONG) == 0


def test_looking_at_a_long_prefix_takes_a_small_part_of_the_time(
    cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = _stored_long(cache)
    num_looks = 0
    status_of = ChunkFiles.status_of

    def slow_status_of(self: ChunkFiles, name: ChunkName) -> os.stat_result | None:
        nonlocal num_looks
        num_looks += 1
        time.sleep(0.001)
        return status_of(self, name)

    monkeypatch.setattr(ChunkFiles, "status_of", slow_status_of)
    begun_at = time.monotonic()
    for number in range(50):
        assert store(cache, [number] * CHUNK, prefix) == CHUNK
        prefix += [number] * CHUNK

    num_whole_looks = 1 + (time.monotonic() - begun_at) // (10 * 0.2)
    assert num_looks <= num_whole_looks * 252 + 2 * 50, "each update looks at its own chunk and at the last before it"


def test_an_unaligned_prefix_is_an_error(cache: FileCache) -> None:
    with pytest.raises(ConfigError, match="prefix of 3 tokens is not whole chunks of 4"):
        store(cache, TOKENS[3:], TOKENS[:3])


def test_kv_of_another_length_is_an_error(cache: FileCache) -> None:
    kv = Tensors(3)

    with pytest.raises(ConfigError, match="4 tokens, but the KV of 3"):
        cache.update(None, TOKENS[:4], kv)
    with pytest.raises(ConfigError, match="4 tokens, but the KV of 3"):
        cache.query(TOKENS[:4], kv)


@pytest.mark.parametrize("wrong", [5, {1, 2, 3, 4}, iter([1, 2, 3, 4]), {1: 2}], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_sequence_is_an_error(cache: FileCache, wrong: Any) -> None:
    kv = Tensors(CHUNK)
    name = type(wrong).__name__

    with pytest.raises(ConfigError, match=f"tokens must be a sequence, not {name}"):
        cache.update(None, wrong, kv)
    with pytest.raises(ConfigError, match=f"tokens must be a sequence, not {name}"):
        cache.query(wrong, kv)
    with pytest.raises(ConfigError, match=f"KV must be a sequence, not {name}"):
        cache.query(TOKENS[:CHUNK], wrong)
    with pytest.raises(ConfigError, match=f"prefix must be a sequence, not {name}"):
        cache.update(wrong, TOKENS[:CHUNK], kv)
    with pytest.raises(ConfigError, match=f"a token's KV must be a sequence, not {name}"):
        cache.update(None, TOKENS[:CHUNK], [wrong] * CHUNK)


def test_token_ids_may_be_numpys_and_a_prefix_of_rows_is_an_error(cache: FileCache) -> None:
    tokens = np.array(TOKENS)
    assert cache.update(None, tokens[:CHUNK], Tensors(CHUNK).fill([], TOKENS[:CHUNK])) == CHUNK
    assert cache.update(tokens[:CHUNK], tokens[CHUNK:], Tensors(3 * CHUNK).fill(TOKENS[:CHUNK], TOKENS[CHUNK:]))

    assert found(cache, TOKENS) == len(TOKENS)
    with pytest.raises(ConfigError, match="token ids must be whole numbers"):
        cache.update(tokens.reshape(-1, 1).repeat(2, axis=1), TOKENS[:CHUNK], Tensors(CHUNK))


@pytest.mark.parametrize("num_stored", [0, CHUNK], ids=["absent", "stored"])
def test_kv_of_chunks_that_exist_is_checked_as_that_of_new_ones(cache: FileCache, num_stored: int) -> None:
    tokens = TOKENS[:CHUNK]
    store(cache, tokens[:num_stored])
    kv = Tensors(CHUNK)
    key, value = kv[0][0]
    wrong: list[tuple[Any, str]] = [
        ([of_token[:1] for of_token in kv], "token 0 has KV of 1 layers, not 2"),
        (["ab"] * CHUNK, "a pair of KVTensors"),
        ([["ab", "ab"]] * CHUNK, "a pair of KVTensors for every token and layer, not of str"),
        ([[(key, value, value)] * LAYERS] * CHUNK, "a pair of KVTensors"),
        ([[5, 5]] * CHUNK, "a pair of KVTensors"),
        (Tensors(CHUNK, TENSOR_BYTES + 1), "is not a tensor of 48 bytes"),
    ]

    for given, sentence in wrong:
        with pytest.raises(ConfigError, match=sentence):
            cache.update(None, tokens, given)
        with pytest.raises(ConfigError, match=sentence):
            cache.query(tokens, given)

    assert found(cache, tokens) == num_stored


def test_released_tensors_of_another_cache_are_an_error_for_chunks_that_exist(cache: FileCache) -> None:
    store(cache, TOKENS)
    tensors = Tensors(len(TOKENS))
    hold = _CountingHold()
    hold.is_over = True
    tensors[-1][-1][-1]._hold = hold

    with pytest.raises(ConfigError, match="released"):
        cache.update([], TOKENS, tensors)


def test_tensors_of_another_shape_are_an_error_and_nothing_is_left_behind(cache: FileCache, tmp_path: Path) -> None:
    kv = Tensors(CHUNK).fill([], TOKENS[:CHUNK])
    wrong_size = Tensors(CHUNK, TENSOR_BYTES + 1)
    wrong_layers = [[*of_token, of_token[0]] for of_token in kv]
    nothing = [[(KVTensor(0, 0), KVTensor(0, 0))] * LAYERS] * CHUNK
    store(cache, TOKENS[:CHUNK])

    for wrong, sentence in [(wrong_size, "48 bytes"), (wrong_layers, "3 layers, not 2"), (nothing, "48 bytes")]:
        with pytest.raises(ConfigError, match=sentence):
            cache.update(TOKENS[:CHUNK], TOKENS[CHUNK : 2 * CHUNK], wrong)
        with pytest.raises(ConfigError, match=sentence):
            cache.query(TOKENS[:CHUNK], wrong)

    assert len(chunk_paths(tmp_path)) == 1
    assert temp_names(tmp_path) == []


@pytest.mark.parametrize(("tensor_bytes", "num_segments"), [(4096, 1), (1 << 18, 2), ((1 << 20) + 4, 5)])
def test_chunks_of_many_segments_aligned_or_not_come_back_whole(
    tmp_path: Path, tensor_bytes: int, num_segments: int
) -> None:
    with closing(open_files(tmp_path, tensor_bytes=tensor_bytes)) as cache:
        assert cache._store.num_segments == num_segments
        assert store(cache, TOKENS[: 2 * CHUNK], nbytes=tensor_bytes) == 2 * CHUNK
        assert found(cache, TOKENS[: 2 * CHUNK], tensor_bytes) == 2 * CHUNK


def test_a_filesystem_without_direct_io_serves_as_well(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.refuses_direct = True
    with closing(open_files(tmp_path, files=files)) as cache:
        store(cache, TOKENS)
        assert found(cache, TOKENS) == len(TOKENS)


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


# --- what goes, and when ---------------------------------------------------------------------------------------------


def _used_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in chunk_paths(root))


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
