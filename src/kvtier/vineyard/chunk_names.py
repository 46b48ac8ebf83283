"""Names of a token sequence's chunks: a wide hash that is the identity, and Vineyard's Murmur hash for the folder.

Both continue from chunk to chunk, so names cost the same however long the sequence is. A caller that stores a sequence
piece by piece passes all of it as a prefix each time; the last few sequences are remembered with their hash states.
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
    """The identity of a shape: caches of different shapes never share a chunk."""
    shape = b"".join(number.to_bytes(8, "little") for number in (tensor_bytes, layer, chunk_tokens))
    return Namespace(hashlib.sha256(_IDENTITY + shape).digest())


class NamedChunks:
    """The names of all full chunks of a sequence that grows at its end. Used by one thread at a time.

    Until `trusted_until`, on the reader's clock, all of its chunks count as present: all were when last checked, and
    nothing has been removed since, apart from removals counted in `trusted_removals`.
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
        """Add whole chunks. Raises `ConfigError` for invalid token ids, and then changes nothing."""
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
    """Names for caches of one shape. Raises `ConfigError` if `mmh3` is not installed. Thread-safe."""

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
        """The names of `prefix`, which is whole chunks, and of the full chunks of `tokens` behind it.

        They belong to the caller until it hands them to `remember`.
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
    except ValueError as error:  # raised by numpy, about arrays in a list
        raise ConfigError(f"token ids must be whole numbers from 0 to 2**32-1: {error}") from error


def _check_ids(tokens: list[int]) -> None:
    """Raises `ConfigError` for values that only equal token ids, such as 1.0."""
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
