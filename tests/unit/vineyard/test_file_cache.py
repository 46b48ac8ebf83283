"""What the file cache stores, finds and refuses, one process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.vineyard import KVTensor
from kvtier.vineyard.chunk_files import ChunkFiles, ChunkName, ChunkWriter
from kvtier.vineyard.file_cache import FileCache
from tests.support.faulty_files import FaultyFiles
from tests.support.vineyard_files import (
    CHUNK,
    LAYERS,
    TENSOR_BYTES,
    TOKENS,
    Tensors,
    chunk_paths,
    found,
    open_files,
    store,
    temp_names,
)


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
