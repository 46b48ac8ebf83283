"""Names of a token sequence's chunks: a wide hash that is the identity, and Vineyard's Murmur hash for the folder.

Both run on from chunk to chunk, so names cost the same however long the sequence is. Whoever stores a sequence bit by
bit passes all of it as a prefix each time; the last few sequences are remembered with the state of their hashes.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from array import array
from collections import deque
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.vineyard.chunk_files import ChunkName

try:
    import mmh3
except ModuleNotFoundError:
    mmh3 = None  # type: ignore[assignment]

_MAX_REMEMBERED = 8
_IDENTITY = b"kvtier vineyard chunk 1"


def identity_of(tensor_bytes: int, layer: int, chunk_tokens: int) -> Namespace:
    """Caches of different shapes never have a chunk in common."""
    shape = b"".join(number.to_bytes(8, "little") for number in (tensor_bytes, layer, chunk_tokens))
    return Namespace(hashlib.sha256(_IDENTITY + shape).digest())


class NamedChunks:
    """The names of all full chunks of a sequence that grows at its end. Of one thread at a time.

    Until `trusted_until`, on the clock of whoever looks, all of its chunks are taken to be in the folder, where they
    were all seen, unless something was removed that `trusted_removals` does not count.
    """

    def __init__(self, identity: Namespace, chunk_tokens: int, folder_digits: int) -> None:
        self.tokens: list[int] = []
        self.names: list[ChunkName] = []
        self.trusted_until = float("-inf")
        self.trusted_removals = 0
        self._identity = identity
        self._chunk_tokens = chunk_tokens
        self._folder_digits = folder_digits
        self._murmur = mmh3.mmh3_32()

    def extend(self, tokens: list[int]) -> None:
        """Whole chunks. Raises `ConfigError` for what is no token id; the sequence is then as before."""
        parent = BlockHash(self.names[-1].digest) if self.names else None
        digests = block_hashes(self._identity, tokens, self._chunk_tokens, parent=parent)
        data = _little_endian(tokens)
        step = 4 * self._chunk_tokens
        for position, digest in enumerate(digests):
            self._murmur.update(data[position * step : (position + 1) * step])
            folder = f"{self._murmur.uintdigest():08x}"[: self._folder_digits]
            self.names.append(ChunkName(folder, digest, len(self.names)))
        self.tokens += tokens


class ChunkNames:
    """Names for caches of one shape. Raises `ConfigError` where `mmh3` is not installed. Thread-safe."""

    def __init__(self, identity: Namespace, chunk_tokens: int, folder_digits: int) -> None:
        if mmh3 is None:
            raise ConfigError("the file cache needs mmh3: pip install 'kvtier[vineyard]'")
        self._identity = identity
        self._chunk_tokens = chunk_tokens
        self._folder_digits = folder_digits
        self._lock = threading.Lock()
        self._remembered: deque[NamedChunks] = deque(maxlen=_MAX_REMEMBERED)

    def of(self, tokens: Sequence[int]) -> list[ChunkName]:
        """The names of all full chunks."""
        return self._named(_full(tokens, self._chunk_tokens)).names

    def continued(self, prefix: Sequence[int], tokens: Sequence[int]) -> NamedChunks:
        """Those of `prefix`, which is whole chunks, and of the full chunks of `tokens` behind it.

        The caller alone has them until it hands them to `remember`.
        """
        known = self._recall(prefix if isinstance(prefix, list) else list(prefix))
        known.extend(_full(tokens, self._chunk_tokens))
        return known

    def remember(self, chunks: NamedChunks) -> None:
        with self._lock:
            self._remembered.append(chunks)

    def _recall(self, prefix: list[int]) -> NamedChunks:
        with self._lock:
            for known in self._remembered:
                if len(known.tokens) == len(prefix) and _is_same(known.tokens, prefix):
                    _check_ids(prefix)
                    self._remembered.remove(known)
                    return known
        return self._named(prefix)

    def _named(self, tokens: list[int]) -> NamedChunks:
        chunks = NamedChunks(self._identity, self._chunk_tokens, self._folder_digits)
        chunks.extend(tokens)
        return chunks


def _is_same(tokens: list[int], others: list[int]) -> bool:
    try:
        return tokens == others
    except ValueError as error:  # numpy's, about arrays in a list
        raise ConfigError(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error


def _check_ids(tokens: list[int]) -> None:
    """Raises `ConfigError` for what only equals token ids, as 1.0 does."""
    try:
        array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error


def _full(tokens: Sequence[int], chunk_tokens: int) -> list[int]:
    return list(tokens[: len(tokens) // chunk_tokens * chunk_tokens])


def _little_endian(tokens: list[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
