"""Tensors that are whole pages are read and written in place; what the caller does with them harms nobody's chunks."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import LeaseError
from kvtier.vineyard import KVTensor, kv_cache
from kvtier.vineyard.kv_cache import KVCache
from tests.support.vineyard_files import CHUNK, LAYERS, Tensors, chunk_paths, found, open_files, store

_PAGE = 4096
_TOKENS = list(range(2 * CHUNK))


class _AlignedTensors(Tensors):
    """Side by side in whole pages."""

    def __init__(self, num_tokens: int, *, is_one_for_all: bool = False) -> None:
        self._pages = mmap.mmap(-1, num_tokens * LAYERS * 2 * _PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        step = 0 if is_one_for_all else _PAGE
        addresses = (start + step * number for number in range(num_tokens * LAYERS * 2))
        list.__init__(
            self,
            (
                [(KVTensor(next(addresses), _PAGE), KVTensor(next(addresses), _PAGE)) for _ in range(LAYERS)]
                for _ in range(num_tokens)
            ),
        )


def test_whole_pages_come_back_whole(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, tensor_bytes=_PAGE)) as cache:
        stored = _AlignedTensors(len(_TOKENS)).fill([], _TOKENS)
        assert cache.update(None, _TOKENS, stored) == len(_TOKENS)
        tensors = _AlignedTensors(len(_TOKENS))
        assert cache.query(_TOKENS, tensors) == len(_TOKENS)
        tensors.expect(_TOKENS)
        assert found(cache, _TOKENS, _PAGE) == len(_TOKENS)


def test_memory_that_is_given_twice_is_a_miss_and_removes_nothing(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, tensor_bytes=_PAGE)) as cache:
        store(cache, _TOKENS, nbytes=_PAGE)
        assert cache.query(_TOKENS, _AlignedTensors(len(_TOKENS), is_one_for_all=True)) < len(_TOKENS)
        assert len(chunk_paths(tmp_path)) == 2
        assert found(cache, _TOKENS, _PAGE) == len(_TOKENS)


def test_damage_to_a_file_that_is_read_in_place_is_still_found(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, tensor_bytes=_PAGE)) as cache:
        store(cache, _TOKENS, nbytes=_PAGE)
        with chunk_paths(tmp_path)[1].open("r+b") as file:
            file.seek(3 * _PAGE)
            file.write(b"noise")
        assert cache.query(_TOKENS, _AlignedTensors(len(_TOKENS))) == CHUNK
        assert len(chunk_paths(tmp_path)) == 1


def test_a_client_with_a_small_capacity_that_only_reads_leaves_others_chunks(tmp_path: Path) -> None:
    tokens = list(range(6 * CHUNK))
    with closing(open_files(tmp_path)) as cache, closing(open_files(tmp_path, capacity=CHUNK)) as reader:
        store(cache, tokens)
        assert found(reader, tokens) == len(tokens)
    with closing(open_files(tmp_path, capacity=CHUNK)) as reader:
        assert found(reader, tokens) == len(tokens)
    assert len(chunk_paths(tmp_path)) == 6


def test_updates_and_queries_of_many_threads_do_not_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    with closing(open_files(tmp_path, io_workers=2)) as cache:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(12):
                    tokens = [number % 3, turn % 4, *range(4 * CHUNK - 2)]
                    if (number + turn) % 2:
                        store(cache, tokens)
                    else:
                        found(cache, tokens)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_an_error_inside_with_is_not_replaced_by_that_of_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = object.__new__(KVCache)

    def refuse(self: KVCache) -> None:
        raise LeaseError("in use")

    monkeypatch.setattr(kv_cache.KVCache, "close", refuse)
    with pytest.raises(ZeroDivisionError), cache:
        raise ZeroDivisionError
    with pytest.raises(LeaseError), cache:
        pass
