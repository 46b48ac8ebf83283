"""The C++ `KVCache` beside Python's: the same tree in shared memory, the same chunk files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.testing.servers import cache_server
from kvtier.vineyard import FileCacheConfig, KVCache, KVTensor, VineyardCacheConfig
from scripts import wire_vectors
from tests.support.actors import held, open_client
from tests.support.c_programs import CProgram, c_program
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

_TENSOR_BYTES, _LAYERS, _CHUNK = 80, 3, 4
_NAME = "a tree é"


def _expected(tokens: Sequence[int], position: int, layer: int, is_value: bool) -> np.ndarray:
    """Fills tensors like `tensor_lines.cc`."""
    start = 31 * sum(tokens[: position + 1]) + 7 * layer + 3 * is_value
    return ((start + np.arange(_TENSOR_BYTES)) & 255).astype(np.uint8)


class _Python:
    """Python's cache, asked in the words of the C++ program."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def update(self, prefix: Sequence[int], tokens: Sequence[int]) -> int:
        every = [*prefix, *tokens]
        arrays = [
            [
                [_expected(every, len(prefix) + i, layer, is_value) for is_value in (False, True)]
                for layer in range(_LAYERS)
            ]
            for i in range(len(tokens))
        ]
        kv = [[tuple(KVTensor(a.ctypes.data, a.nbytes) for a in pair) for pair in layers] for layers in arrays]
        return self._cache.update(prefix, tokens, kv)  # type: ignore[arg-type]

    def query(self, tokens: Sequence[int], *, fills: bool) -> int:
        """How many tokens were found; their bytes are checked."""
        arrays = [[[np.zeros(_TENSOR_BYTES, np.uint8) for _ in range(2)] for _ in range(_LAYERS)] for _ in tokens]
        kv = [
            [tuple(KVTensor(a.ctypes.data, a.nbytes) if fills else KVTensor(0, 0) for a in pair) for pair in layers]
            for layers in arrays
        ]
        count = self._cache.query(tokens, kv)  # type: ignore[arg-type]
        for i in range(count):
            for layer in range(_LAYERS):
                for is_value in (False, True):
                    found = arrays[i][layer][is_value] if fills else np.frombuffer(kv[i][layer][is_value], np.uint8)
                    assert np.array_equal(found, _expected(tokens, i, layer, is_value))
                    del found
        return count


def _text(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens)) or "-"


def _update(cpp: CProgram, prefix: Sequence[int], tokens: Sequence[int]) -> str:
    return cpp.ask(f"update {_text(prefix)} {_text(tokens)}")


def _query(cpp: CProgram, tokens: Sequence[int], prefix: Sequence[int] = ()) -> str:
    return cpp.ask(f"query {_text(prefix)} {_text(tokens)}")


# --- shared memory -------------------------------------------------------------------------------------------------


@contextmanager
def _shared(
    programs: Path, address: str, capacity: int, token: str = "", finds_leaks: bool = False
) -> Iterator[CProgram]:
    arguments = ["shared", address, _NAME, str(_TENSOR_BYTES), str(capacity), str(_LAYERS), *([token] if token else [])]
    with c_program(programs / "tensor_lines", *arguments, finds_leaks=finds_leaks) as cpp:
        assert cpp.hear() == "done"
        yield cpp


def _python_tree(address: str, capacity: int) -> KVCache:
    config = VineyardCacheConfig(address, llm_cache_object_name=_NAME, timeout_s=CALL_S)
    return KVCache(config, tensor_bytes=_TENSOR_BYTES, cache_capacity=capacity, layer=_LAYERS)


def test_a_tree_is_shared_with_python(sanitized_programs: Path) -> None:
    tokens = list(range(1, 70))
    with (
        cache_server() as server,
        open_client(server.unix) as watcher,
        _python_tree(server.unix, 1000) as cache,
        _shared(sanitized_programs, server.unix, 1000, finds_leaks=True) as cpp,
    ):
        python = _Python(cache)
        assert _update(cpp, [], tokens[:40]) == "update 40"
        assert python.query(tokens, fills=False) == 40
        assert python.update(tokens[:40], tokens[40:]) == 29
        assert _query(cpp, tokens) == "query 69 wrong 0"
        assert _query(cpp, tokens[40:], tokens[:40]) == "query 29 wrong 0"
        assert _query(cpp, [1, 2, 3, 99]) == "query 3 wrong 0"
        assert _update(cpp, [1, 2, 99], [100]) == "update 0", "a prefix that is not there"
        assert _update(cpp, tokens[:40], tokens[40:]) == "update 29", "those that were there count"
        assert cpp.ask("query - 1,-2").startswith("failed token ids")
        cache.release()
        assert cpp.ask("release") == "released"
        wait_until(lambda: held(watcher)[:2] == (2, 0), "only the table of times of use is leased, by both")
        assert cpp.ask("close") == "closed"
        assert _query(cpp, tokens).startswith("failed this cache is closed")
        wait_until(lambda: held(watcher)[:2] == (1, 0))


def test_a_tree_over_tcp(sanitized_programs: Path) -> None:
    tokens = list(range(1, 30))
    with (
        cache_server(tcp=True) as server,
        _python_tree(server.unix, 1000) as cache,
        _shared(sanitized_programs, server.tcp, 1000, server.token) as cpp,
    ):
        assert _update(cpp, [], tokens) == "update 29"
        assert _query(cpp, tokens) == "query 29 wrong 0"
        assert _Python(cache).query(tokens, fills=False) == 29


def test_the_capacity_holds_and_what_was_used_last_stays(sanitized_programs: Path) -> None:
    capacity = 20
    with (
        cache_server(memory="4MiB") as server,
        _python_tree(server.unix, capacity) as cache,
        _shared(sanitized_programs, server.unix, capacity) as cpp,
    ):
        python = _Python(cache)
        assert _update(cpp, [], list(range(1, 70))) == f"update {capacity}", "a sequence is cut at the capacity"
        assert python.update([], list(range(100, 110))) == 10
        assert _query(cpp, list(range(1, 70))) == "query 10 wrong 0", "its end was pruned"
        assert cpp.ask("release") == "released"
        assert _update(cpp, [], list(range(200, 205))) == "update 5"
        assert _query(cpp, list(range(100, 110))) == "query 5 wrong 0", "used before the other one was"
        assert _query(cpp, list(range(1, 11))) == "query 10 wrong 0"


# --- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def _files(
    programs: Path, root: Path, capacity: int, ttl_s: int = 1800, finds_leaks: bool = False
) -> Iterator[CProgram]:
    arguments = ["files", str(root), str(_CHUNK), str(_TENSOR_BYTES), str(capacity), str(_LAYERS), str(ttl_s), "1"]
    with c_program(programs / "tensor_lines", *arguments, finds_leaks=finds_leaks) as cpp:
        assert cpp.hear() == "done"
        yield cpp


def _python_files(root: Path, capacity: int) -> KVCache:
    config = FileCacheConfig(chunk_size=_CHUNK, split_number=2, root=str(root))
    return KVCache(config, tensor_bytes=_TENSOR_BYTES, cache_capacity=capacity, layer=_LAYERS)


def _chunks(root: Path) -> list[Path]:
    return [path for path in root.rglob("*-*") if path.is_file() and "__temp" not in path.parts]


def test_chunk_files_are_shared_with_python(sanitized_programs: Path, tmp_path: Path) -> None:
    tokens = list(range(1, 40))
    root = tmp_path / "chunks"
    with _files(sanitized_programs, root, 1000, finds_leaks=True) as cpp, _python_files(root, 1000) as cache:
        python = _Python(cache)
        assert _update(cpp, [], tokens[:18]) == "update 16", "whole chunks"
        assert python.query(tokens, fills=True) == 16
        assert python.update(tokens[:16], tokens[16:]) == 20
        assert _query(cpp, tokens) == "query 36 wrong 0"
        assert _query(cpp, tokens[16:], tokens[:16]) == "query 20 wrong 0"
        assert _update(cpp, [7, 7, 7, 7], [8, 8, 8, 8]) == "update 0", "a prefix that is not there"
        assert _update(cpp, [1], [2, 3, 4, 5]).startswith("failed a prefix of 1 tokens is not whole chunks")
        assert len(_chunks(root)) == 9
    assert not list((root / "__temp").iterdir())


def test_a_damaged_chunk_is_a_miss_and_goes(sanitized_programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "chunks"
    with _files(sanitized_programs, root, 1000) as cpp:
        assert _update(cpp, [], range(1, 9)) == "update 8"
        for path, change in zip(sorted(_chunks(root), key=lambda path: path.name[-1]), (5000, 0), strict=True):
            with open(path, "r+b") as file:
                if change:
                    file.seek(change - 904)
                    file.write(b"\xff")
                else:
                    file.truncate(100)
        assert _query(cpp, range(1, 9)) == "query 0 wrong 0"
        assert len(_chunks(root)) == 1
        assert _update(cpp, [], range(1, 9)) == "update 8"
        assert _query(cpp, range(1, 9)) == "query 8 wrong 0"


def test_the_bound_of_a_folder_holds_for_both(sanitized_programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "chunks"
    capacity = 5 * _CHUNK
    with _files(sanitized_programs, root, capacity) as cpp, _python_files(root, capacity) as cache:
        python = _Python(cache)
        assert _update(cpp, [], range(1, 70)) == f"update {capacity}"
        assert python.update([], list(range(100, 112))) == 12
        assert len(_chunks(root)) == 5
        assert _query(cpp, range(100, 112)) == "query 12 wrong 0"
        assert _query(cpp, range(1, 70)) == "query 8 wrong 0", "a sequence's end goes first"
        assert _update(cpp, [], range(200, 208)) == "update 8"
        assert len(_chunks(root)) == 5


def test_old_chunks_go_by_themselves(sanitized_programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "chunks"
    with _files(sanitized_programs, root, 1000, ttl_s=1) as cpp:
        assert _update(cpp, [], range(1, 9)) == "update 8"
        wait_until(lambda: not _chunks(root))


def test_a_folder_that_others_write_to_is_refused(programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    arguments = ["files", str(root), "4", "80", "100", "3", "1800", "1800"]
    with c_program(programs / "tensor_lines", *arguments) as cpp:
        assert "can be written to by other users" in cpp.hear()


def test_chunks_lie_where_the_vectors_say(programs: Path) -> None:
    for vector in json.loads(wire_vectors.FILE.read_text())["chunks"]:
        shape = [vector["chunk_tokens"], vector["tensor_bytes"], "-", vector["layer"]]
        command = [programs / "tensor_lines", "names", _text(vector["tokens"]), *map(str, shape)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert found == [f"{folder}/{file}" for folder, file in zip(vector["folders"], vector["files"], strict=True)]


# --- Vineyard's program --------------------------------------------------------------------------------------------


def test_a_program_of_vineyards_shape_runs_over_shared_memory(programs: Path) -> None:
    with cache_server(memory="4MiB") as server:
        socket = server.unix.removeprefix("unix:")
        command = [programs / "vineyard_rounds", "--client-num", "2", "--vineyard-ipc-sockets", socket, socket]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stderr) == (0, "Passed.\n")


def test_a_program_of_vineyards_shape_runs_over_files(programs: Path, tmp_path: Path) -> None:
    command = [programs / "vineyard_rounds", "--root", str(tmp_path / "chunks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "Passed.\n")


@pytest.mark.parametrize("address", ["unix:/does/not/exist", "nonsense://x"])
def test_a_server_that_is_not_there_is_told(programs: Path, address: str) -> None:
    arguments = ["shared", address, _NAME, "80", "100", "3"]
    with c_program(programs / "tensor_lines", *arguments) as cpp:
        assert cpp.hear().startswith("failed ")
