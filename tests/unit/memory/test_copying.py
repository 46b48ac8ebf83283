"""Copies between arenas and a caller's buffers."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.memory.copying import address_of, byte_views, copy_blocks

BLOCK_BYTES = 24


def addresses(arena: bytearray, slots: list[int]) -> list[int]:
    with memoryview(arena) as view:
        base = address_of(view)
    return [base + slot * BLOCK_BYTES for slot in slots]


@given(st.integers(1, 12), st.data())
def test_every_block_lands_in_its_place_and_nowhere_else(num_slots: int, data: st.DataObject) -> None:
    slots = st.lists(st.integers(0, num_slots - 1), unique=True, max_size=num_slots)
    destinations = data.draw(slots)
    sources = data.draw(st.permutations(range(num_slots)))[: len(destinations)]
    source = bytearray(random.Random(num_slots).randbytes(num_slots * BLOCK_BYTES))
    target = bytearray(b"\xa5" * len(source))
    expected = bytearray(target)
    for to, start in zip(destinations, sources, strict=True):
        expected[to * BLOCK_BYTES : (to + 1) * BLOCK_BYTES] = source[start * BLOCK_BYTES : (start + 1) * BLOCK_BYTES]

    copy_blocks(addresses(target, destinations), addresses(source, sources), BLOCK_BYTES)

    assert target == expected


def test_a_long_run_is_copied_whole() -> None:
    slots = list(range(1000))
    source = bytearray(random.Random(1).randbytes(len(slots) * BLOCK_BYTES))
    target = bytearray(len(source))

    copy_blocks(addresses(target, slots), addresses(source, slots), BLOCK_BYTES)

    assert target == source


def test_an_address_is_that_of_the_views_first_byte() -> None:
    buffer = bytearray(100)
    with memoryview(buffer) as whole, whole[10:] as part:
        assert address_of(part) == address_of(whole) + 10


def test_an_address_does_not_hold_on_to_its_buffer() -> None:
    buffer = bytearray(100)
    with memoryview(buffer) as view:
        address_of(view)

    buffer.extend(b"grows only while nobody exports it")


@pytest.mark.parametrize("buffer", [bytearray(24), array("I", range(6)), memoryview(bytearray(24)).cast("d", [3])])
def test_any_contiguous_buffer_becomes_flat_bytes_over_the_same_memory(buffer: bytearray) -> None:
    (view,) = byte_views([buffer], 24, writable=True)
    view[0] = 0x7F

    assert (view.format, view.ndim, len(view)) == ("B", 1, 24)
    assert bytes(memoryview(buffer).cast("B"))[0] == 0x7F


def test_an_array_of_several_dimensions_becomes_flat_bytes() -> None:
    (view,) = byte_views([memoryview(bytes(range(24))).cast("B", [2, 3, 4])], 24, writable=False)

    assert bytes(view) == bytes(range(24))


def test_a_buffer_of_another_size_is_named_by_its_position() -> None:
    with pytest.raises(ConfigError, match="buffer 1 has 23 bytes; a block has 24"):
        byte_views([bytes(24), bytes(23)], 24, writable=False)


def test_a_read_only_buffer_is_read_but_not_filled() -> None:
    assert len(byte_views([bytes(24)], 24, writable=False)) == 1
    with pytest.raises(ConfigError, match="buffer 0 is read-only"):
        byte_views([bytes(24)], 24, writable=True)


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(ConfigError, match="not C-contiguous"):
        byte_views([memoryview(bytearray(48))[::2]], 24, writable=True)


def test_what_offers_no_bytes_is_refused_like_any_wrong_buffer() -> None:
    with pytest.raises(ConfigError):
        byte_views([[0] * 24], 24, writable=True)  # type: ignore[list-item]
