"""Chunk files for the tests of Vineyard's file cache: bytes follow from the sequence they belong to: a wrong one shows.

As a program, `python -m tests.support.vineyard_files ACT ROOT SEED`, it is another process of such a test, until it is
killed or the one that started it has ended.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier.stores.files import Files
from kvtier.vineyard import FileCacheConfig, KVTensor
from kvtier.vineyard.file_cache import FileCache
from kvtier.vineyard.kv_tensor import TokenTensors

CHUNK = 4
LAYERS = 2
TENSOR_BYTES = 48
TEMP = "__temp"
SHARED_CAPACITY = 60 * CHUNK
FILE_BYTES = 8192
TOKENS = list(range(100, 100 + 4 * CHUNK))


def open_files(
    root: Path | str,
    *,
    capacity: int = 1 << 20,
    tensor_bytes: int = TENSOR_BYTES,
    files: Files | None = None,
    **settings: object,
) -> FileCache:
    config = FileCacheConfig(root=str(root), **{"chunk_size": CHUNK, "io_workers": 2, **settings})  # type: ignore[arg-type]
    return FileCache(config, tensor_bytes=tensor_bytes, cache_capacity=capacity, layer=LAYERS, files=files)


def tensor_of(sequence: Sequence[int], layer: int, part: int, nbytes: int = TENSOR_BYTES) -> bytes:
    """The K (`part` 0) or V (1) of the last token of `sequence`."""
    seed = hashlib.sha256(repr((tuple(sequence), layer, part)).encode()).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


class Tensors(list[TokenTensors]):
    """The KV of some tokens, every tensor for itself, in memory of this object."""

    def __init__(self, num_tokens: int, nbytes: int = TENSOR_BYTES) -> None:
        self._memory = ctypes.create_string_buffer(num_tokens * LAYERS * 2 * (nbytes + 8))
        addresses = iter(range(ctypes.addressof(self._memory), 1 << 63, nbytes + 8))
        super().__init__(
            [(KVTensor(next(addresses), nbytes), KVTensor(next(addresses), nbytes)) for _ in range(LAYERS)]
            for _ in range(num_tokens)
        )

    def fill(self, prefix: Sequence[int], tokens: Sequence[int]) -> Tensors:
        whole = [*prefix, *tokens]
        for position, of_token in enumerate(self, len(prefix) + 1):
            for layer, pair in enumerate(of_token):
                for part, tensor in enumerate(pair):
                    memoryview(tensor)[:] = tensor_of(whole[:position], layer, part, tensor.nbytes)
        return self

    def expect(self, tokens: Sequence[int]) -> None:
        """The leading tensors are those of `tokens`."""
        for position in range(len(tokens)):
            for layer, pair in enumerate(self[position]):
                for part, tensor in enumerate(pair):
                    expected = tensor_of(tokens[: position + 1], layer, part, tensor.nbytes)
                    assert bytes(memoryview(tensor)) == expected, (position, layer, part)


def store(cache: FileCache, tokens: Sequence[int], prefix: Sequence[int] = (), nbytes: int = TENSOR_BYTES) -> int:
    return cache.update(list(prefix), list(tokens), Tensors(len(tokens), nbytes).fill(prefix, tokens))


def found(cache: FileCache, tokens: Sequence[int], nbytes: int = TENSOR_BYTES) -> int:
    """The number of leading tokens found, whose bytes are all right."""
    tensors = Tensors(len(tokens), nbytes)
    count = cache.query(list(tokens), tensors)
    tensors.expect(tokens[:count])
    return count


def chunk_paths(root: Path) -> list[Path]:
    """By depth."""
    paths = [path for path in root.glob("*/*-*") if path.parent.name != TEMP]
    return sorted(paths, key=lambda path: int(path.name.partition("-")[2]))


def temp_names(root: Path) -> list[str]:
    return [name for name in os.listdir(root / TEMP) if name.endswith(".tmp")]


def make_older(path: Path, by_s: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime - by_s, status.st_mtime - by_s))


def _sequence(dice: random.Random) -> list[int]:
    """One of a few dozen, many of which begin alike."""
    return [dice.randrange(2) for _ in range(3)] + [0] + list(range(CHUNK * dice.randint(1, 9)))


def main() -> None:
    act, root, seed = sys.argv[1:]
    parent = os.getppid()
    dice = random.Random(int(seed))
    cache = open_files(root, capacity=SHARED_CAPACITY, ttl=0.5, client_gc_interval=0.1)
    total = 0
    print("begun", flush=True)
    while os.getppid() == parent:
        tokens = _sequence(dice)
        if act == "write":
            split = CHUNK * dice.randrange(len(tokens) // CHUNK)
            store(cache, tokens[:split])
            total += store(cache, tokens[split:], tokens[:split])
        else:
            total += found(cache, tokens)  # fails on a wrong byte
        print(total, flush=True)


if __name__ == "__main__":
    main()
