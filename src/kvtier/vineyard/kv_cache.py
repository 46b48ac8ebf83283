"""`KVCache`: Vineyard's class for programs with KV tensors in an engine of their own. Its config picks the half."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier.errors import ConfigError
from kvtier.vineyard.file_cache import FileCache
from kvtier.vineyard.file_config import FileCacheConfig
from kvtier.vineyard.held_tokens import FoundTokens
from kvtier.vineyard.ignored_settings import log_ignored
from kvtier.vineyard.kv_tensor import TokenTensors
from kvtier.vineyard.scope import ClosedAtExit
from kvtier.vineyard.shared_cache import MAX_LAYERS, MAX_TOKEN_BYTES, SharedCache
from kvtier.vineyard.vineyard_config import VineyardCacheConfig
from kvtier.vineyard.whole_numbers import whole_number


class _Half(Protocol):
    def update(self, prefix: Sequence[int] | None, tokens: Sequence[int], kv: Sequence[TokenTensors], /) -> int: ...

    def query(self, tokens: Sequence[int], kv: Sequence[TokenTensors], /) -> int: ...

    def stats(self) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class KVCache(ClosedAtExit):
    """The KV of token sequences, `layer` pairs of tensors of `tensor_bytes` for each token, `cache_capacity` tokens.

    With `VineyardCacheConfig`, it is in the shared memory of cache servers; with `FileCacheConfig`, in files of a
    folder. Raises `ConfigError`, a `ValueError`, for impossible settings. Any thread; ends with `close` or `with`.
    """

    def __init__(
        self,
        cache_config: VineyardCacheConfig | FileCacheConfig,
        tensor_bytes: int = 10,
        cache_capacity: int = 10,
        layer: int = 1,
    ) -> None:
        self.tensor_bytes = whole_number("tensor_bytes", tensor_bytes, most=MAX_TOKEN_BYTES)
        self.cache_capacity = whole_number("cache_capacity", cache_capacity)
        self.layer = whole_number("layer", layer, most=MAX_LAYERS)
        self._half = _open(cache_config, self.tensor_bytes, self.cache_capacity, self.layer)
        if isinstance(self._half, FileCache):
            weakref.finalize(self, self._half.close)  # for programs that never call `close`, such as Vineyard's

    def update(self, prefix: Sequence[int] | None, tokens: Sequence[int], kv_cache_list: Sequence[TokenTensors]) -> int:
        """Store the KV of `tokens`, which follow `prefix`: `kv_cache_list[token][layer]` is a pair of `KVTensor`.

        Returns how many of the tokens are in the cache afterwards, from the first on. Tokens stored before count; the
        result is 0 if the prefix is absent. With files, whole chunks count, and the prefix must be whole chunks. Raises
        `ConfigError` for invalid arguments. The caller may reuse its memory on return.
        """
        return self._half.update(prefix, tokens, kv_cache_list)

    def query(self, tokens: Sequence[int], kv_cache_list: Sequence[TokenTensors]) -> int:
        """Find the KV of the leading tokens that are cached; returns how many.

        With files, the caller's tensors are filled. With shared memory, they are pointed into it: read-only, and valid
        until the cache is closed or the tensors and all arrays made of them are gone. Raises `ConfigError` for invalid
        arguments; any failure in the cache is a miss.
        """
        return self._half.query(tokens, kv_cache_list)

    def query_addresses(self, tokens: Sequence[int]) -> FoundTokens:
        """Like `query`, for shared memory only, without an object for each tensor. Raises `ConfigError` with files."""
        if isinstance(self._half, SharedCache):
            return self._half.query_addresses(tokens)
        raise ConfigError("chunks in files have no addresses; query fills the caller's tensors")

    def release(self) -> None:
        """Release the hits of all queries in shared memory; their tensors can no longer be read.

        Raises `LeaseError` while arrays or views of some of them are in use. With files, there is nothing to release.
        """
        if isinstance(self._half, SharedCache):
            self._half.release()

    def stats(self) -> Mapping[str, int]:
        """Counts of this object since its start: hits, misses, and what was damaged, refused or evicted."""
        return self._half.stats()

    def close(self) -> None:
        """Release everything; cached tokens stay. May be called again."""
        self._half.close()


def _open(config: object, tensor_bytes: int, cache_capacity: int, layer: int) -> _Half:
    if isinstance(config, VineyardCacheConfig | FileCacheConfig):
        log_ignored(config)
    if isinstance(config, FileCacheConfig):
        return FileCache(config, tensor_bytes=tensor_bytes, cache_capacity=cache_capacity, layer=layer)
    if isinstance(config, VineyardCacheConfig):
        return SharedCache(config, tensor_bytes=tensor_bytes, cache_capacity=cache_capacity, layer=layer)
    raise ConfigError(f"cache_config must be a VineyardCacheConfig or a FileCacheConfig, not {config!r}")
