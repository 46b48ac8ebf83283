"""Block identity: a SHA-256 chain over token ids, rooted in the namespace.

`hash(n) = SHA-256(hash(n-1) ‖ token ids of block n as little-endian u32)`, and `hash(-1)` is the namespace, or for a
prompt with a salt of its own a digest of both. So one hash names a block *and* everything before it, the same in every
process, restart and machine.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType, cast

from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError

BlockHash = NewType("BlockHash", bytes)
"""32 bytes."""

HASH_BYTES = 32

_SALTED = b"salted root"


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
    sha256 = hashlib.sha256
    last: bytes = namespace if parent is None else parent
    block_bytes = 4 * block_tokens
    full = memoryview(data)[: len(data) // block_bytes * block_bytes]
    hashes: list[bytes] = []
    for (block,) in struct.iter_unpack(f"{block_bytes}s", full):
        last = sha256(last + block).digest()
        hashes.append(last)
    return cast("list[BlockHash]", hashes)


def salted_root(namespace: Namespace, salt: str) -> Namespace:
    """Where the chain of a prompt with `salt` begins: prompts of different salts never have a hash in common.

    Without a salt that is the namespace itself. Nobody can tell the salt from the hashes, unless by guessing it.
    """
    if not salt:
        return namespace
    # Starts unlike a block's digest does: no block of any tokens has this hash.
    return Namespace(hashlib.sha256(_SALTED + namespace + salt.encode(errors="surrogatepass")).digest())


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    return [BlockHash(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES)]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        tokens = memoryview(tokens).tolist()  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        pass  # not a buffer, or one of a format that only its own iterator knows
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
