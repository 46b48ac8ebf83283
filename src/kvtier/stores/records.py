"""The form of a disk store's records: a header, and records of 256 bytes. Pure: no files here.

A record is self-contained: it has a block's key, its place, the checksum of key and payload, and a checksum of its own,
which is valid only for the record's own number. Two fit in a 512-byte sector and none crosses a boundary, so a torn
write damages no neighbour.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

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
_MAX_BLOCK_BYTES = 1 << 40
_MAX_TOKENS = 1 << 20
_MAX_START = 1 << 51  # beyond it there is no valid file offset
MAX_COUNT = 1 << 62  # limit of `sequence` and `used_at`: counting on from there never overflows
_PINNED, _SEALED = 1, 2
_KNOWN_FLAGS = _PINNED | _SEALED

HEADER_BYTES = 4096
_HEADER_MAGIC = b"KVTIERDK"
_HEADER = struct.Struct("<8sIIQ")
KEY_CHECK_BYTES = 32


class BlockRecord(NamedTuple):
    """A block that is on disk, from unit `start` on. `name` is the readable name of its namespace."""

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
    seal: bytes = b""
    """What opening its ciphertext needs; empty for a block in plaintext."""


class DamagedRecord:
    """Bytes that may once have been a record."""


DAMAGED = DamagedRecord()


def encode_block(record: BlockRecord, number: int) -> bytes:
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
        _PINNED * record.is_pinned | _SEALED * bool(record.seal),
        record.seal or _PAD,
        0,
    )[:-8]
    return raw + struct.pack("<Q", xxhash.xxh3_64_intdigest(raw, number))


def decode_records(raw: memoryview, first_number: int = 0) -> Iterator[BlockRecord | DamagedRecord | None]:
    """Every record from a number on; None for a free one. A record with impossible values is damaged."""
    digest = xxhash.xxh3_64_intdigest
    names: dict[bytes, str] = {}
    namespaces: dict[bytes, Namespace] = {}
    first = 0
    for number, fields in enumerate(_RECORD.iter_unpack(raw), first_number):
        magic, tokens, start, nbytes, sequence, used_at, namespace, key, checksum, name, flags, pad, own = fields
        if not magic and not own:
            yield None
        elif (
            magic != _RECORD_MAGIC
            or (pad == _PAD) == bool(flags & _SEALED)
            or not 0 < nbytes <= _MAX_BLOCK_BYTES
            or not 0 < tokens <= _MAX_TOKENS
            or start > _MAX_START
            or sequence > MAX_COUNT
            or used_at > MAX_COUNT
            or flags & ~_KNOWN_FLAGS
            or digest(raw[first : first + RECORD_BYTES - 8], number) != own
        ):
            yield DAMAGED
        else:
            label = names.get(name)
            if label is None:
                label = names[name] = name.rstrip(b"\0").decode(errors="replace")
            known = namespaces.setdefault(namespace, Namespace(namespace))  # one object for all its blocks
            yield BlockRecord(
                known,
                BlockHash(key),
                start,
                nbytes,
                tokens,
                sequence,
                used_at,
                checksum,
                label,
                bool(flags & _PINNED),
                pad if flags & _SEALED else b"",
            )
        first += RECORD_BYTES


class Header(NamedTuple):
    """A record file's header. `key_check` identifies the key of its ciphertexts; empty if unknown."""

    version: int
    num_records: int
    key_check: bytes = b""


def encode_header(header: Header) -> bytes:
    start = _HEADER.pack(_HEADER_MAGIC, header.version, UNIT_BYTES, header.num_records)
    body = (start + header.key_check).ljust(HEADER_BYTES - 8, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def decode_header(raw: bytes) -> Header | None:
    """None if it is damaged, which costs nothing: records stand on their own."""
    if len(raw) < HEADER_BYTES or not raw.startswith(_HEADER_MAGIC):
        return None
    if struct.unpack_from("<Q", raw, HEADER_BYTES - 8)[0] != xxhash.xxh3_64_intdigest(raw[: HEADER_BYTES - 8]):
        return None
    _, version, _, num_records = _HEADER.unpack_from(raw)
    key_check = raw[_HEADER.size : _HEADER.size + KEY_CHECK_BYTES]
    return Header(version, num_records, key_check if any(key_check) else b"")
