"""How a disk store writes down what it holds: superblocks, and records of 256 bytes. Pure: no files here.

A record is self-contained: it names a block's key, its place, the checksum of key and payload, and it has a checksum of
its own. Two lie in a 512-byte sector and none crosses one, so a torn write damages no neighbour.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace

FORMAT_VERSION = 1
UNIT_BYTES = 4096

RECORD_BYTES = 256
_RECORD = struct.Struct("<IIQQQQ32s32sQ96sI36sQ")
_RECORD_MAGIC = 0x52_54_56_4B
_PAD = bytes(36)
FREE_RECORD = bytes(RECORD_BYTES)
_MAX_NAME_BYTES = 96

SUPERBLOCK_BYTES = 64 << 10
NUM_SUPERBLOCKS = 2
_SUPERBLOCK_MAGIC = b"KVTIERDK"
_SUPERBLOCK = struct.Struct("<8sIIQQQ")
_MAX_CHUNKS = (SUPERBLOCK_BYTES - _SUPERBLOCK.size - 8) // 8


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block that is on disk, from unit `start` on. `name` is what people call its namespace."""

    namespace: Namespace
    hash: BlockHash
    start: int
    block_bytes: int
    block_tokens: int
    sequence: int
    used_at: int
    checksum: int
    name: str
    is_pinned: bool


class DamagedRecord:
    """Bytes that were a record once, or never."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """The root: where the chunks of records lie, in units. The copy with the higher sequence counts."""

    sequence: int
    chunk_bytes: int
    chunks: tuple[int, ...]

    max_chunks = _MAX_CHUNKS


class UnknownFormat(Exception):
    """A superblock of another version. `version` says which."""

    def __init__(self, version: int) -> None:
        super().__init__(f"format version {version}")
        self.version = version


def encode_block(record: BlockRecord) -> bytes:
    raw = _RECORD.pack(
        _RECORD_MAGIC,
        record.block_tokens,
        record.start,
        record.block_bytes,
        record.sequence,
        record.used_at,
        record.namespace,
        record.hash,
        record.checksum,
        record.name.encode()[:_MAX_NAME_BYTES],
        int(record.is_pinned),
        _PAD,
        0,
    )[:-8]
    return raw + struct.pack("<Q", xxhash.xxh3_64_intdigest(raw))


def decode_records(chunk: bytes) -> Iterator[BlockRecord | DamagedRecord | None]:
    """Every record of a chunk in order; None where it is free."""
    for first in range(0, len(chunk), RECORD_BYTES):
        fields = _RECORD.unpack_from(chunk, first)
        if fields[0] == 0 and fields[-1] == 0:
            yield None
            continue
        magic, tokens, start, nbytes, sequence, used_at, namespace, key, checksum, name, flags, pad, own = fields
        raw = chunk[first : first + RECORD_BYTES - 8]
        if magic != _RECORD_MAGIC or pad != _PAD or not nbytes or xxhash.xxh3_64_intdigest(raw) != own:
            yield DamagedRecord()
            continue
        label = name.rstrip(b"\0").decode(errors="replace")
        is_pinned = bool(flags & 1)
        yield BlockRecord(
            Namespace(namespace), BlockHash(key), start, nbytes, tokens, sequence, used_at, checksum, label, is_pinned
        )


def encode_superblock(superblock: Superblock) -> bytes:
    head = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC,
        FORMAT_VERSION,
        UNIT_BYTES,
        superblock.sequence,
        superblock.chunk_bytes,
        len(superblock.chunks),
    )
    body = (head + struct.pack(f"<{len(superblock.chunks)}Q", *superblock.chunks)).ljust(SUPERBLOCK_BYTES - 8, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def decode_superblocks(copies: Sequence[bytes]) -> Superblock | None:
    """The newest whole copy, or None. Raises `UnknownFormat` when what is there is of another version."""
    newest: Superblock | None = None
    other_version: int | None = None
    for raw in copies:
        if len(raw) < SUPERBLOCK_BYTES or not raw.startswith(_SUPERBLOCK_MAGIC):
            continue
        _, version, unit_bytes, sequence, chunk_bytes, num_chunks = _SUPERBLOCK.unpack_from(raw)
        is_whole = struct.unpack_from("<Q", raw, SUPERBLOCK_BYTES - 8)[0] == xxhash.xxh3_64_intdigest(raw[:-8])
        if version != FORMAT_VERSION:
            other_version = version
            continue
        if not is_whole or unit_bytes != UNIT_BYTES or num_chunks > _MAX_CHUNKS:
            continue
        if newest is None or sequence > newest.sequence:
            chunks = struct.unpack_from(f"<{num_chunks}Q", raw, _SUPERBLOCK.size)
            newest = Superblock(sequence, chunk_bytes, chunks)
    if newest is None and other_version is not None:
        raise UnknownFormat(other_version)
    return newest
