"""A batch's tensors are the rows it was built from, and graphs read them at fixed addresses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.kernels.attention import attend
from kvtier.kernels.backend import Backend
from kvtier.kernels.paged_batch import ChunkBuffers, DecodeBuffers, PagedArrays, PagedBatch, PagedRow, cut
from kvtier.kernels.tuning import GATHER_TOKENS, MAX_ROW_SHARES, MAX_SPLIT_TILES
from tests.support.batches import DEVICE, make_case

NO_TOKENS = np.zeros(0, np.int64)


def last_tokens() -> torch.Tensor:
    return torch.tensor([70, 71, 72, 73, 74, 75], device=DEVICE)


def build(*rows: PagedRow, num_padding_rows: int = 0) -> PagedBatch:
    return PagedArrays.lay_out(rows, block_tokens=4, num_padding_rows=num_padding_rows).upload(DEVICE)


def test_slots_and_positions_follow_the_blocks() -> None:
    batch = build(PagedRow([7, 3], 1, 6), PagedRow([9, 2, 5], 3, 9))

    assert batch.slots.tolist() == [3 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 5 * 4]
    assert batch.positions.tolist() == [5, 6, 7, 8]
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.kv_lengths.tolist() == [6, 9]
    assert batch.block_tables.tolist() == [[7, 3, 0], [9, 2, 5]]
    assert (batch.num_tokens, batch.num_rows, batch.max_query_tokens, batch.num_decodes) == (4, 2, 3, 1)


def test_dtypes_are_those_kernels_read() -> None:
    batch = build(PagedRow([0], 1, 1))

    assert batch.slots.dtype == batch.positions.dtype == torch.int64
    assert batch.block_tables.dtype == batch.query_starts.dtype == batch.kv_lengths.dtype == torch.int32


def test_counters_begin_at_zero_and_graphs_of_every_size_share_theirs() -> None:
    buffers = DecodeBuffers(max_rows=4, max_blocks=8, block_tokens=4, last_tokens=last_tokens(), kv_heads=2)
    captured = buffers.batch(4)
    buffers.fill(NO_TOKENS, PagedArrays.lay_out([PagedRow([0], 1, 1)], block_tokens=4))

    for batch in (build(PagedRow([0], 1, 1)), captured):
        assert batch.counters.tolist() == [0] * MAX_SPLIT_TILES
        assert batch.counters.dtype == torch.int32
    assert buffers.batch(2).counters.data_ptr() == captured.counters.data_ptr()


def test_slots_of_a_far_block_do_not_wrap() -> None:
    assert build(PagedRow([(1 << 31) - 1], 1, 1)).slots.tolist() == [((1 << 31) - 1) * 4]


def test_block_ids_may_be_an_array_longer_than_the_context() -> None:
    block_ids = np.array([4, 6, 8, 1], np.int32)

    assert build(PagedRow(block_ids, 2, 5)).block_tables.tolist() == [[4, 6]]


def test_padding_rows_have_one_query_and_no_kv() -> None:
    batch = build(PagedRow([1], 1, 2), num_padding_rows=2)

    assert batch.slots.tolist() == [5, -1, -1]
    assert batch.positions.tolist() == [1, 0, 0]
    assert batch.kv_lengths.tolist() == [2, 0, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 3]
    assert batch.num_decodes == 3


def test_rows_that_do_not_write_have_no_slots_and_read_all_the_same() -> None:
    batch = build(PagedRow([7, 3], 1, 8, writes=False), PagedRow([5], 1, 2))

    assert batch.slots.tolist() == [-1, 5 * 4 + 1]
    assert batch.positions.tolist() == [7, 1]
    assert batch.kv_lengths.tolist() == [8, 2]
    assert batch.block_tables.tolist()[0] == [7, 3]


def test_empty_rows_have_no_query_and_padding_tokens_no_row() -> None:
    arrays = PagedArrays.lay_out([PagedRow([1], 2, 2)], block_tokens=4, num_empty_rows=2, num_padding_tokens=3)
    batch = arrays.upload(DEVICE)

    assert batch.slots.tolist() == [4, 5, -1, -1, -1]
    assert batch.positions.tolist() == [0, 1, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 2, 2, 2]
    assert batch.kv_lengths.tolist() == [2, 0, 0]


def test_rows_that_are_no_decodes_have_places_of_their_own_to_be_gathered_at() -> None:
    batch = build(PagedRow([1], 1, 2), PagedRow(list(range(50)), 10, 200), PagedRow([1], 2, 2), PagedRow([2], 1, 4))

    assert batch.num_decodes == 1
    assert batch.gather_starts.tolist() == [0, 2 * GATHER_TOKENS, 3 * GATHER_TOKENS]
    assert batch.num_gathered_tokens == 4 * GATHER_TOKENS
    assert batch.queries_per_key == (10 * 200 + 2 * 2 + 1 * 4) / 206


def test_an_empty_batch_and_rows_without_queries() -> None:
    assert build().num_tokens == 0
    batch = build(PagedRow([], 0, 0), PagedRow([2], 0, 3), PagedRow([1], 2, 2), PagedRow([3], 1, 1))
    assert batch.slots.tolist() == [4, 5, 12]
    assert batch.num_decodes == 2


def test_buffers_hold_each_batch_at_the_same_addresses() -> None:
    buffers = DecodeBuffers(max_rows=4, max_blocks=8, block_tokens=8, last_tokens=last_tokens(), kv_heads=2)
    captured = buffers.batch(4)
    addresses = [captured.slots.data_ptr(), captured.block_tables.data_ptr(), captured.kv_lengths.data_ptr()]

    for lengths in ([(1, 40), (1, 3)], [(1, 9), (1, 2), (1, 33)]):
        case = make_case(lengths)
        batch = case.batch(Backend.of(DEVICE), num_padding_rows=4 - len(lengths))
        buffers.fill(NO_TOKENS, PagedArrays.lay_out(case.rows, block_tokens=8, num_padding_rows=4 - len(lengths)))
        query, key, value = (
            torch.cat((one, one.new_zeros(4 - len(lengths), *one.shape[1:])))
            for one in (case.query, case.key, case.value)
        )
        expected = attend(query, key, value, case.cache.clone(), batch, scale=1.0)
        found = attend(query, key, value, case.cache.clone(), buffers.batch(4), scale=1.0)
        torch.testing.assert_close(found, expected)

    assert addresses == [captured.slots.data_ptr(), captured.block_tables.data_ptr(), captured.kv_lengths.data_ptr()]


def test_buffers_of_chunks_hold_rows_of_any_length_at_the_same_addresses() -> None:
    buffers = ChunkBuffers(max_tokens=16, max_rows=4, max_blocks=8, block_tokens=8, last_tokens=last_tokens())
    captured = buffers.batch(16, 4)
    addresses = [captured.slots.data_ptr(), captured.query_starts.data_ptr(), captured.kv_lengths.data_ptr()]

    for lengths in ([(5, 40), (1, 3)], [(1, 9), (9, 20), (3, 33)]):
        case = make_case(lengths)
        num_tokens = len(case.query)
        arrays = PagedArrays.lay_out(
            case.rows, block_tokens=8, num_empty_rows=4 - len(lengths), num_padding_tokens=16 - num_tokens
        )
        buffers.fill(NO_TOKENS, arrays)
        padded = [
            torch.cat((one, one.new_zeros(16 - num_tokens, *one.shape[1:])))
            for one in (case.query, case.key, case.value)
        ]
        expected = attend(
            case.query, case.key, case.value, case.cache.clone(), case.batch(Backend.of(DEVICE)), scale=1.0
        )
        found = attend(*padded, case.cache.clone(), buffers.batch(16, 4), scale=1.0)
        torch.testing.assert_close(found[:num_tokens], expected)

    assert addresses == [captured.slots.data_ptr(), captured.query_starts.data_ptr(), captured.kv_lengths.data_ptr()]


TENSORS = ("slots", "positions", "query_starts", "kv_lengths")


@pytest.mark.parametrize("num_padding_rows", [0, 1, 5])
def test_decode_buffers_hold_what_was_laid_out_and_the_tokens_of_slots(num_padding_rows: int) -> None:
    last = last_tokens()
    buffers = DecodeBuffers(max_rows=8, max_blocks=9, block_tokens=4, last_tokens=last, kv_heads=2)
    rows = [PagedRow([7, 3], 1, 6), PagedRow([9, 2, 5], 1, 9), PagedRow([1], 1, 1)]
    arrays = PagedArrays.lay_out(rows, block_tokens=4, num_padding_rows=num_padding_rows)

    buffers.fill(np.array([~4, 11, ~0]), arrays)

    num_rows = 3 + num_padding_rows
    assert buffers.tokens(num_rows).tolist() == [74, 11, 70] + [0] * num_padding_rows
    assert_holds(buffers.batch(num_rows), arrays)


def test_chunk_buffers_hold_what_was_laid_out_and_the_tokens_of_slots() -> None:
    buffers = ChunkBuffers(max_tokens=16, max_rows=4, max_blocks=9, block_tokens=4, last_tokens=last_tokens())
    small = PagedArrays.lay_out([PagedRow([2], 2, 3)], block_tokens=4)
    large = PagedArrays.lay_out(
        [PagedRow([7, 3], 1, 6), PagedRow([9, 2, 5], 5, 9)], block_tokens=4, num_empty_rows=2, num_padding_tokens=10
    )

    for arrays, tokens, expected in (
        (large, [~5, 1, 2, 3, 4, 5], [75, 1, 2, 3, 4, 5] + [0] * 10),
        (small, [8, 9], [8, 9]),
        (large, [6, 1, 2, 3, 4, ~0], [6, 1, 2, 3, 4, 70] + [0] * 10),
    ):
        buffers.fill(np.array(tokens), arrays)

        assert buffers.tokens(arrays.num_tokens).tolist() == expected
        assert_holds(buffers.batch(arrays.num_tokens, arrays.num_rows), arrays)


def test_filling_leaves_the_rest_of_the_block_tables_alone() -> None:
    buffers = DecodeBuffers(max_rows=3, max_blocks=4, block_tokens=4, last_tokens=last_tokens(), kv_heads=2)
    buffers.fill(NO_TOKENS, PagedArrays.lay_out([PagedRow([5, 6, 7, 8], 1, 16)] * 3, block_tokens=4))

    buffers.fill(NO_TOKENS, PagedArrays.lay_out([PagedRow([1, 2], 1, 8)] * 2, block_tokens=4))

    assert buffers.batch(3).block_tables.tolist() == [[1, 2, 7, 8], [1, 2, 7, 8], [5, 6, 7, 8]]


def assert_holds(batch: PagedBatch, arrays: PagedArrays) -> None:
    for name in TENSORS:
        found, expected = getattr(batch, name), torch.from_numpy(getattr(arrays, name))
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected), name
    num_rows, num_blocks = arrays.block_tables.shape
    assert batch.block_tables.shape[0] == num_rows
    assert batch.block_tables[:, :num_blocks].tolist() == arrays.block_tables.tolist()


# --- shares ----------------------------------------


def counts_of(lengths: list[int], num_shares: int) -> list[int]:
    """How many shares each row has; all that must hold of any is checked on the way."""
    shares = cut(np.array(lengths, np.int32), num_shares)
    assert shares.shape == (len(lengths) + num_shares, 4)
    assert shares.dtype == np.int32
    counts = [int((shares[:, 0] == row).sum()) for row in range(len(lengths))]
    expected = [[row, number, count, lengths[row]] for row, count in enumerate(counts) for number in range(count)]
    assert shares[: len(expected)].tolist() == expected
    assert (shares[len(expected) :] == -1).all()
    return counts


@given(st.lists(st.integers(0, 40_000), max_size=80), st.integers(1, 132))
def test_every_row_has_shares_and_all_are_about_equal(lengths: list[int], num_shares: int) -> None:
    counts = counts_of(lengths, num_shares)

    assert all(1 <= count <= MAX_ROW_SHARES for count in counts)
    with_keys = [(length, count) for length, count in zip(lengths, counts, strict=True) if length]
    assert all(count == 1 for length, count in zip(lengths, counts, strict=True) if not length)
    assert sum(count for _, count in with_keys) <= max(num_shares, len(with_keys) + num_shares // 4)
    tiles = [math.ceil(length / 128) for length, _ in with_keys]
    longest = max((math.ceil(of / count) for of, (_, count) in zip(tiles, with_keys, strict=True)), default=1)
    if longest > 1 and max(counts) < MAX_ROW_SHARES:
        with_less = sum(math.ceil(of / (longest - 1)) for of in tiles)
        assert with_less > max(num_shares, len(with_keys) + num_shares // 4), "shares could be shorter"


@pytest.mark.parametrize(
    ("lengths", "num_shares", "expected"),
    [
        ([10_276] * 10, 66, [6] * 10),
        ([10_276] * 10 + [0] * 6, 66, [6] * 10 + [1] * 6),
        ([8_000] * 16, 66, [4] * 16),
        ([1_060] * 64, 66, [1] * 64),
        ([], 66, []),
    ],
)
def test_rows_of_one_length_have_the_same_number_of_shares(
    lengths: list[int], num_shares: int, expected: list[int]
) -> None:
    assert counts_of(lengths, num_shares) == expected


@pytest.mark.parametrize("num_short", [16, 100])
def test_a_long_row_among_short_ones_has_many_shares(num_short: int) -> None:
    counts = counts_of([1_060] * num_short + [30_000], 66)

    assert counts[-1] >= 16
    assert max(counts[:-1]) <= 2


def test_decode_buffers_hold_the_shares_of_what_was_filled_in() -> None:
    buffers = DecodeBuffers(max_rows=8, max_blocks=99, block_tokens=16, last_tokens=last_tokens(), kv_heads=4)
    assert buffers.batch(2).shares is None, "so few rows are split alike"
    for lengths in ([1500, 40, 900, 3], [7, 1200, 1200, 16]):
        rows = [PagedRow(list(range(94)), 1, length) for length in lengths]
        buffers.fill(NO_TOKENS, PagedArrays.lay_out(rows, block_tokens=16, num_padding_rows=2))

        shares = buffers.batch(6).shares
        assert shares is not None
        assert shares.cpu().tolist() == cut(np.array([*lengths, 0, 0], np.int32), 66).tolist()
