"""How a disk store writes things down: round trips and damage."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import BlockHash, Namespace
from kvtier.stores.records import (
    FREE_RECORD,
    HEADER_BYTES,
    MAX_COUNT,
    RECORD_BYTES,
    BlockRecord,
    DamagedRecord,
    Header,
    decode_header,
    decode_records,
    encode_block,
    encode_header,
)

_RECORD = BlockRecord(
    Namespace(bytes(range(32))), BlockHash(bytes(range(32, 64))), 48, 10_240, 16, 7, 9, 0xFEDC_BA98_7654_3210, "a", True
)


def _decode(raw: bytes) -> list[BlockRecord | DamagedRecord | None]:
    return list(decode_records(memoryview(raw)))


_u64 = st.integers(0, 2**64 - 1)
_counts = st.integers(0, MAX_COUNT)
_records = st.builds(
    BlockRecord,
    st.binary(min_size=32, max_size=32).map(Namespace),
    st.binary(min_size=32, max_size=32).map(BlockHash),
    st.integers(0, 2**51),
    st.integers(1, 2**40),
    st.integers(1, 2**20),
    _counts,
    _counts,
    _u64,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=24),
    st.booleans(),
    st.just(b"") | st.binary(min_size=36, max_size=36).filter(any),
)


@given(st.lists(st.none() | _records, max_size=8))
def test_records_come_back_as_they_were(records: list[BlockRecord | None]) -> None:
    raw = b"".join(
        FREE_RECORD if record is None else encode_block(record, number) for number, record in enumerate(records)
    )
    assert len(raw) == len(records) * RECORD_BYTES
    assert _decode(raw) == records


def test_a_record_without_a_seal_has_zeros_in_its_place_as_it_always_had() -> None:
    raw = encode_block(_RECORD, 0)
    assert raw[-44:-8] == bytes(36)
    assert raw[-48:-44] == b"\1\0\0\0"
    assert hashlib.sha256(raw).hexdigest() == "e6906aab5cf2e235875f83873872baa46cc369823328786a64af80ff614a1084"


@pytest.mark.parametrize("name", ["x" * 200, "é" * 100, "ü" + "€" * 60])
def test_a_long_name_is_cut_and_the_record_stays_whole(name: str) -> None:
    (record,) = _decode(encode_block(_RECORD._replace(name=name), 0))
    assert isinstance(record, BlockRecord)
    assert record._replace(name="") == _RECORD._replace(name="")
    assert name.startswith(record.name.rstrip("\ufffd"))
    assert len(record.name) > 20


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("byte", range(RECORD_BYTES))
def test_a_record_with_any_bit_flipped_is_damaged_and_its_neighbours_are_not(byte: int) -> None:
    raw = bytearray(b"".join(encode_block(_RECORD, number) for number in range(3)))
    raw[RECORD_BYTES + byte] ^= 1 << byte % 8
    first, second, third = _decode(bytes(raw))
    assert first == third == _RECORD
    assert isinstance(second, DamagedRecord)


@pytest.mark.parametrize("num_bytes", range(8, RECORD_BYTES, 8))
def test_a_record_written_in_part_over_another_is_damaged(num_bytes: int) -> None:
    newer = _RECORD._replace(hash=BlockHash(bytes(32)), sequence=8, start=1)
    old, new = encode_block(_RECORD, 0), encode_block(newer, 0)
    (torn,) = _decode(new[:num_bytes] + old[num_bytes:])
    assert isinstance(torn, DamagedRecord) or torn == _RECORD, "the parts are equal up to there"


def test_a_record_in_anothers_place_is_damaged() -> None:
    first, second = _decode(encode_block(_RECORD, 1) + encode_block(_RECORD, 1))
    assert isinstance(first, DamagedRecord)
    assert second == _RECORD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence", 2**64 - 1),
        ("sequence", MAX_COUNT + 1),
        ("used_at", 2**64 - 1),
        ("start", 2**64 - 1),
        ("block_bytes", 0),
        ("block_bytes", 2**64 - 1),
        ("block_tokens", 0),
        ("block_tokens", 2**32 - 1),
    ],
)
def test_a_record_with_a_number_that_nobody_writes_is_damaged(field: str, value: int) -> None:
    (record,) = _decode(encode_block(_RECORD._replace(**{field: value}), 0))
    assert isinstance(record, DamagedRecord)


def test_a_wiped_record_is_free_and_noise_is_damaged() -> None:
    assert _decode(FREE_RECORD * 3) == [None] * 3
    noise = random.Random(1).randbytes(RECORD_BYTES * 20)
    assert all(isinstance(record, DamagedRecord) for record in _decode(noise))


@pytest.mark.parametrize(
    "header", [Header(1, 0), Header(1, 256), Header(0, 3), Header(77, 2**40), Header(1, 2, bytes(range(32)))]
)
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    raw = encode_header(header)
    assert len(raw) == HEADER_BYTES
    assert decode_header(raw) == header


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 24, 47, 1000, HEADER_BYTES - 1])
def test_a_damaged_header_says_nothing(offset: int) -> None:
    raw = bytearray(encode_header(Header(1, 256)))
    raw[offset] ^= 0x10
    assert decode_header(bytes(raw)) is None


def test_nothing_is_no_header() -> None:
    assert decode_header(b"") is None
    assert decode_header(bytes(HEADER_BYTES)) is None
    assert decode_header(encode_header(Header(1, 256))[:-1]) is None
