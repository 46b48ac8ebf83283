"""Tensors for the tests of Vineyard's caches: bytes that follow from the sequence they belong to, so a wrong one shows.

As a program, `python -m tests.support.vineyard_tensors ACT SOCKET NUMBERS...`, it is another process of such a test.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
from collections.abc import Sequence

from kvtier.vineyard import KVTensor, VineyardCacheConfig
from kvtier.vineyard.kv_tensor import TokenTensors
from kvtier.vineyard.shared_cache import SharedCache
from tests.support.waiting import CALL_S

TENSOR_BYTES = 1000
LAYERS = 2


def tensor_bytes_of(sequence: Sequence[int], layer: int, part: int, nbytes: int = TENSOR_BYTES) -> bytes:
    """The K (`part` 0) or V (1) of the last token of `sequence`."""
    seed = repr((tuple(sequence), layer, part)).encode()
    return (hashlib.sha256(seed).digest() * (nbytes // 32 + 1))[:nbytes]


class Source:
    """The KV of the tokens behind a prefix, in memory of this object."""

    def __init__(
        self, prefix: Sequence[int], tokens: Sequence[int], *, layers: int = LAYERS, nbytes: int = TENSOR_BYTES
    ) -> None:
        self._memory: list[ctypes.Array[ctypes.c_char]] = []
        whole = [*prefix, *tokens]
        self.kv: list[TokenTensors] = [
            [
                (self._tensor(whole[:end], layer, 0, nbytes), self._tensor(whole[:end], layer, 1, nbytes))
                for layer in range(layers)
            ]
            for end in range(len(prefix) + 1, len(whole) + 1)
        ]

    def _tensor(self, sequence: Sequence[int], layer: int, part: int, nbytes: int) -> KVTensor:
        memory = ctypes.create_string_buffer(tensor_bytes_of(sequence, layer, part, nbytes), nbytes)
        self._memory.append(memory)
        return KVTensor(ctypes.addressof(memory), nbytes)


def empty(num_tokens: int, layers: int = LAYERS) -> list[TokenTensors]:
    return [[(KVTensor(0, 0), KVTensor(0, 0)) for _ in range(layers)] for _ in range(num_tokens)]


def expect(tokens: Sequence[int], kv: Sequence[TokenTensors], nbytes: int = TENSOR_BYTES) -> None:
    """`kv` is that of the leading tokens."""
    for position, of_token in enumerate(kv):
        for layer, pair in enumerate(of_token):
            for part, tensor in enumerate(pair):
                assert bytes(memoryview(tensor)) == tensor_bytes_of(tokens[: position + 1], layer, part, nbytes)


def open_cache(
    socket: str,
    *,
    capacity: int = 1 << 30,
    name: str = "tree",
    token: str | None = None,
    timeout_s: float = CALL_S,
) -> SharedCache:
    config = VineyardCacheConfig(socket=socket, llm_cache_object_name=name, token=token, timeout_s=timeout_s)
    return SharedCache(config, tensor_bytes=TENSOR_BYTES, cache_capacity=capacity, layer=LAYERS)


def store(cache: SharedCache, tokens: Sequence[int], prefix: Sequence[int] = ()) -> int:
    source = Source(prefix, tokens)  # its memory lives until the update is over
    return cache.update(prefix, tokens, source.kv)


def found(cache: SharedCache, tokens: Sequence[int]) -> int:
    """The number of leading tokens found, whose bytes are all right. Holds nothing afterwards."""
    kv = empty(len(tokens))
    count = cache.query(tokens, kv)
    expect(tokens, kv[:count])
    return count


def main() -> None:
    act, socket, *numbers = sys.argv[1:]
    tokens = [int(number) for number in numbers]
    cache = open_cache(socket)
    if act == "store":
        print(store(cache, tokens), flush=True)
        cache.close()
        return
    if act == "hold":
        kv = empty(len(tokens))
        print(cache.query(tokens, kv), flush=True)
        sys.stdin.readline()
    if act == "store for ever":
        print("begun", flush=True)
        start = tokens[0]
        for first in itertools.cycle(range(start, start + 20_000, 1000)):  # about as many as the server can hold
            store(cache, range(first, first + 50))


if __name__ == "__main__":
    main()
