"""Block identity: a SHA-256 chain over token ids, rooted in the namespace.

`hash(n) = SHA-256(hash(n-1) ‖ token ids of block n as little-endian u32)`, and `hash(-1)` is the namespace or, for a
prompt with its own salt, a digest of both. So one hash names a block *and* everything before it, identically in every
process, after every restart and on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType, cast

from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError

BlockHash = NewType("BlockHash", bytes)
"""A block's chained SHA-256 digest, 32 bytes."""

HASH_BYTES = 32

_SALTED = b"salted root"

_RUN_BLOCKS = 64
_RUN_TOKENS = 1024
_MAX_RUNS = 2048
"""Recent hashes are cached in runs of this many blocks or tokens: prompts share beginnings, and hashing takes a fifth
of the time to first token of a long cached prompt. The cache covers 2 million tokens, in 20 MB with blocks of 16."""


def block_hashes(
    namespace: Namespace, tokens: Sequence[int], block_tokens: int, *, parent: BlockHash | None = None
) -> list[BlockHash]:
    """The hashes of all full blocks of `tokens`; a partial block at the end has none.

    `tokens` is any sequence of ints; arrays and buffers of ints are read without a loop. With `parent`, `tokens`
    continue after that block. Raises `ConfigError` for a token id that is not in 0..2**32-1.
    """
    if block_tokens <= 0:
        raise ConfigError(f"block_tokens must be positive, not {block_tokens}")
    data = _token_bytes(tokens)
    last = bytes(namespace if parent is None else parent)
    block_bytes = 4 * block_tokens
    run_bytes = max(1, min(_RUN_BLOCKS, _RUN_TOKENS // block_tokens)) * block_bytes
    hashes: list[bytes] = []
    whole_runs = len(data) // run_bytes * run_bytes
    for start in range(0, whole_runs, run_bytes):
        hashes += _run_hashes(last, data[start : start + run_bytes], block_bytes)
        last = hashes[-1]
    hashes += _chained(last, data[whole_runs : len(data) // block_bytes * block_bytes], block_bytes)
    return cast("list[BlockHash]", hashes)


@functools.lru_cache(maxsize=_MAX_RUNS)
def _run_hashes(last: bytes, data: bytes, block_bytes: int) -> tuple[bytes, ...]:
    """`_chained` with a cache, which compares all of `data`."""
    return tuple(_chained(last, data, block_bytes))


def _chained(last: bytes, data: bytes, block_bytes: int) -> list[bytes]:
    """The hashes of the blocks in `data`, which follow the block with hash `last`."""
    sha256 = hashlib.sha256
    hashes = []
    for (block,) in struct.iter_unpack(f"{block_bytes}s", data):
        last = sha256(last + block).digest()
        hashes.append(last)
    return hashes


def salted_root(namespace: Namespace, salt: str) -> Namespace:
    """The root of the chain for a prompt with `salt`: prompts with different salts never share a hash.

    Without a salt, the root is the namespace itself. The hashes do not reveal the salt, except to guessing.
    """
    if not salt:
        return namespace
    # The input starts unlike that of a block's digest, so no block can have this hash.
    return Namespace(hashlib.sha256(_SALTED + namespace + salt.encode(errors="surrogatepass")).digest())


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    return [BlockHash(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES)]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        tokens = memoryview(tokens).tolist()  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        pass  # not a buffer, or one whose format only its own iterator can read
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
