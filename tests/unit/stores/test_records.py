"""How a disk store writes things down: round trips, damage, and which superblock counts."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier import BlockHash, Namespace
from kvtier.stores.records import (
    FREE_RECORD,
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    BlockRecord,
    DamagedRecord,
    Superblock,
    UnknownFormat,
    decode_records,
    decode_superblocks,
    encode_block,
    encode_superblock,
)

_RECORD = BlockRecord(
    Namespace(bytes(range(32))), BlockHash(bytes(range(32, 64))), 48, 10_240, 16, 7, 9, 0xFEDC_BA98_7654_3210, "a", True
)

_u64 = st.integers(0, 2**64 - 1)
_records = st.builds(
    BlockRecord,
    st.binary(min_size=32, max_size=32).map(Namespace),
    st.binary(min_size=32, max_size=32).map(BlockHash),
    _u64,
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    _u64,
    _u64,
    _u64,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=24),
    st.booleans(),
)


@given(st.lists(st.none() | _records, max_size=8))
def test_records_come_back_as_they_were(records: list[BlockRecord | None]) -> None:
    chunk = b"".join(FREE_RECORD if record is None else encode_block(record) for record in records)
    assert len(chunk) == len(records) * RECORD_BYTES
    assert list(decode_records(chunk)) == records


@pytest.mark.parametrize("name", ["x" * 200, "é" * 100, "ü" + "€" * 60])
def test_a_long_name_is_cut_and_the_record_stays_whole(name: str) -> None:
    (record,) = decode_records(encode_block(replace(_RECORD, name=name)))
    assert isinstance(record, BlockRecord)
    assert replace(record, name="") == replace(_RECORD, name="")
    assert name.startswith(record.name.rstrip("\ufffd"))
    assert len(record.name) > 20


@pytest.mark.parametrize("byte", range(RECORD_BYTES))
def test_a_record_with_any_bit_flipped_is_damaged_and_its_neighbours_are_not(byte: int) -> None:
    raw = bytearray(encode_block(_RECORD) * 3)
    raw[RECORD_BYTES + byte] ^= 1 << byte % 8
    first, second, third = decode_records(bytes(raw))
    assert first == third == _RECORD
    assert isinstance(second, DamagedRecord)


@pytest.mark.parametrize("num_bytes", range(8, RECORD_BYTES, 8))
def test_a_record_written_in_part_over_another_is_damaged(num_bytes: int) -> None:
    old, new = encode_block(_RECORD), encode_block(replace(_RECORD, hash=BlockHash(bytes(32)), sequence=8, start=1))
    (torn,) = decode_records(new[:num_bytes] + old[num_bytes:])
    assert isinstance(torn, DamagedRecord) or torn == _RECORD, "the parts are equal up to there"


def test_a_wiped_record_is_free_and_noise_is_damaged() -> None:
    assert list(decode_records(FREE_RECORD * 3)) == [None] * 3
    noise = random.Random(1).randbytes(RECORD_BYTES * 20)
    assert all(isinstance(record, DamagedRecord) for record in decode_records(noise))


def _copies(*superblocks: Superblock) -> list[bytes]:
    return [encode_superblock(superblock) for superblock in superblocks]


def test_the_superblock_with_the_higher_sequence_counts_wherever_it_lies() -> None:
    older, newer = Superblock(5, 65536, (32,)), Superblock(6, 65536, (32, 99))
    assert decode_superblocks(_copies(older, newer)) == newer
    assert decode_superblocks(_copies(newer, older)) == newer


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 24, 32, 40, 47, 1000, SUPERBLOCK_BYTES - 1])
def test_a_damaged_superblock_does_not_count(offset: int) -> None:
    older, newer = Superblock(5, 65536, (32,)), Superblock(6, 65536, (32, 99))
    raw = bytearray(encode_superblock(newer))
    raw[offset] ^= 0x10
    assert decode_superblocks([bytes(raw), encode_superblock(older)]) == older
    assert decode_superblocks([encode_superblock(older), bytes(raw)]) == older


def test_nothing_is_no_superblock() -> None:
    assert decode_superblocks([b"", b""]) is None
    assert decode_superblocks([bytes(SUPERBLOCK_BYTES)] * 2) is None
    assert decode_superblocks([encode_superblock(Superblock(1, 65536, ()))[:-1]]) is None


def test_as_many_chunks_as_can_be_named_fit() -> None:
    full = Superblock(1, 65536, tuple(range(Superblock.max_chunks)))
    raw = encode_superblock(full)
    assert len(raw) == SUPERBLOCK_BYTES
    assert decode_superblocks([raw]) == full


def _of_version(version: int) -> bytes:
    raw = bytearray(encode_superblock(Superblock(1, 65536, ())))
    struct.pack_into("<I", raw, 8, version)
    struct.pack_into("<Q", raw, SUPERBLOCK_BYTES - 8, xxhash.xxh3_64_intdigest(bytes(raw[:-8])))
    return bytes(raw)


@pytest.mark.parametrize("version", [0, 2, 77])
def test_another_version_is_said_and_not_read(version: int) -> None:
    with pytest.raises(UnknownFormat) as caught:
        decode_superblocks([_of_version(version)] * 2)
    assert caught.value.version == version
