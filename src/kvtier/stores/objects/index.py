"""The end of an object: the hashes of its blocks and a checksum of each, in order, and a checksum of all that.

An object consists of its blocks' payloads, one after another, and this index. The sizes of both follow from the number
of blocks, so a reader knows where each part is without asking.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import RemoteProtocolError

_ENTRY = struct.Struct("<32sQ")
_END = struct.Struct("<4sIQQ")
_MAGIC = b"kvt1"


class Index(NamedTuple):
    """The index of one object: its blocks and their checksums (`checksum_of`)."""

    hashes: tuple[BlockHash, ...]
    checksums: tuple[int, ...]


def index_bytes(num_blocks: int) -> int:
    return num_blocks * _ENTRY.size + _END.size


def encode_index(
    namespace: Namespace, block_bytes: int, hashes: Sequence[BlockHash], checksums: Sequence[int]
) -> bytes:
    entries = b"".join(_ENTRY.pack(*entry) for entry in zip(hashes, checksums, strict=True))
    digest = xxhash.xxh3_64_intdigest(namespace + entries)
    return entries + _END.pack(_MAGIC, len(hashes), block_bytes, digest)


def decode_index(namespace: Namespace, block_bytes: int, num_blocks: int, encoded: bytes) -> Index:
    """Raises `RemoteProtocolError` unless `encoded` is the index of `num_blocks` such blocks of this namespace."""
    if len(encoded) != index_bytes(num_blocks):
        raise RemoteProtocolError(f"an index of {len(encoded)} bytes for {num_blocks} blocks")
    entries = encoded[: -_END.size]
    end = _END.unpack(encoded[-_END.size :])
    if end != (_MAGIC, num_blocks, block_bytes, xxhash.xxh3_64_intdigest(namespace + entries)):
        raise RemoteProtocolError("an index that is damaged, or of other blocks")
    hashes, checksums = zip(*_ENTRY.iter_unpack(entries), strict=True)
    return Index(tuple(map(BlockHash, hashes)), tuple(checksums))
