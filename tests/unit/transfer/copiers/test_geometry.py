"""Pages of any size, order and strides hold the same tokens as blocks; ranks fill their own heads of them.

Also: the runs of bytes as which a block lies in them.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.transfer.copiers.geometry import ByteRun, Geometry, PageOrder
from tests.support.examples import examples
from tests.support.paged_kv import PagedKv
from tests.support.pages import (
    NUM_PAGES,
    STRIDES,
    Case,
    empty_tensors,
    expected_block,
    places_in,
    put,
    random_tensors,
    sequence,
)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    layout = KvLayout(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([2, 8])),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        block_tokens=draw(st.sampled_from([4, 16])),
    )
    page_tokens = draw(st.sampled_from([1, 2, 4, 16, 32, 64]))
    order = draw(st.sampled_from(PageOrder))
    strides = draw(st.sampled_from(STRIDES if order is PageOrder.ROWS else STRIDES[:2]))
    return Case(layout, page_tokens, order, strides)


@given(case=_cases(), seed=st.integers(0, 1000))
@settings(max_examples=examples(150), deadline=None)
def test_blocks_read_from_pages_are_those_of_the_format_and_come_back_the_same(case: Case, seed: int) -> None:
    layout = case.layout
    pages, key, value = sequence(case, seed)
    num_blocks = len(pages) * case.page_tokens // layout.block_tokens
    tensors = empty_tensors(case, layout.kv_heads)
    put(case, tensors, pages, key, value)

    blocks = [bytearray(layout.block_bytes) for _ in range(num_blocks)]
    PagedKv(tensors, layout, case.order).read(pages, 0, blocks)

    assert blocks == [expected_block(layout, key, value, number * layout.block_tokens) for number in range(num_blocks)]
    others = empty_tensors(case, layout.kv_heads)
    PagedKv(others, layout, case.order).write(pages, 0, blocks)
    num_tokens = num_blocks * layout.block_tokens
    expected = empty_tensors(case, layout.kv_heads)
    put(case, expected, pages, key[:, :, :num_tokens], value[:, :, :num_tokens])
    assert all(torch.equal(one, other) for one, other in zip(others, expected, strict=True))


@given(case=_cases(), seed=st.integers(0, 1000))
@settings(max_examples=examples(50), deadline=None)
def test_what_two_ranks_write_together_one_reads_and_the_other_way_round(case: Case, seed: int) -> None:
    layout = case.layout
    if layout.kv_heads == 1:
        return
    pages, key, value = sequence(case, seed)
    if len(pages) * case.page_tokens < layout.block_tokens:
        return
    half = layout.kv_heads // 2
    block = bytearray(layout.block_bytes)
    for first in (0, half):
        tensors = empty_tensors(case, half)
        put(case, tensors, pages, key[:, first : first + half], value[:, first : first + half])
        rank = PagedKv(tensors, layout, case.order, first_head=first)
        assert not Geometry(tensors, layout, case.order, first_head=first).is_whole
        rank.read(pages, 0, [block])

    assert block == expected_block(layout, key, value, 0)
    tensors = empty_tensors(case, half)
    PagedKv(tensors, layout, case.order, first_head=half).write(pages, 0, [block])
    again = bytearray(layout.block_bytes)
    PagedKv(tensors, layout, case.order, first_head=half).read(pages, 0, [again])
    there = torch.frombuffer(again, dtype=key.dtype).view(layout.shape)
    assert torch.equal(there[:, half:], torch.frombuffer(block, dtype=key.dtype).view(layout.shape)[:, half:])
    assert not there[:, :half].any(), "a rank touches no heads but its own"


def test_later_blocks_of_a_sequence_begin_inside_its_pages() -> None:
    case = Case(KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32"), 32, PageOrder.TRANSPOSED_K, "LBHNC")
    pages, key, value = [3, 7], *(torch.randn(2, 2, 64, 4) for _ in range(2))
    tensors = empty_tensors(case, 2)
    put(case, tensors, pages, key, value)

    blocks = [bytearray(case.layout.block_bytes) for _ in range(2)]
    PagedKv(tensors, case.layout, case.order).read(pages, 16, blocks)

    assert blocks == [expected_block(case.layout, key, value, first) for first in (16, 32)]


def test_layers_of_one_storage_are_copied_with_one_call_a_half() -> None:
    case = Case(KvLayout(layers=3, kv_heads=1, head_dim=2, dtype="float32"), 16, PageOrder.ROWS, "BLHNC")

    assert [len(stack) for stack in Geometry(empty_tensors(case, 1), case.layout, case.order).halves()] == [1, 1]


LAYOUT = KvLayout(layers=1, kv_heads=2, head_dim=4, dtype="float32")


@pytest.mark.parametrize(
    ("tensors", "order", "first_head", "sentence"),
    [
        ([torch.zeros(2, 2, 16, 8)] * 2, PageOrder.ROWS, 0, "KV tensors for 2 layers, but blocks have 1"),
        ([torch.zeros(2, 2, 16, 6)], PageOrder.ROWS, 0, r"has the shape \[2, 2, 16, 6\]"),
        ([torch.zeros(2, 16, 8)], PageOrder.ROWS, 0, r"has the shape \[2, 16, 8\]"),
        ([torch.zeros(2, 2, 16, 8).half()], PageOrder.ROWS, 0, "holds torch.float16, but blocks hold float32"),
        ([torch.zeros(2, 2, 16, 8)], PageOrder.ROWS, 1, "heads 1 to 3 are not among the 2 of a block"),
        ([torch.zeros(2, 2, 24, 8)], PageOrder.ROWS, 0, "pages of 24 tokens and blocks of 16"),
        ([torch.zeros(2, 16, 2, 8).transpose(1, 2)], PageOrder.TRANSPOSED_K, 0, "each head as one run of bytes"),
    ],
)
def test_tensors_that_are_not_those_of_such_blocks_are_refused(
    tensors: list[torch.Tensor], order: PageOrder, first_head: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Geometry(tensors, LAYOUT, order, first_head=first_head)


# --- runs ---------------------------------------

WHOLE = KvLayout(layers=28, kv_heads=4, head_dim=128)
ROW_BYTES = 512


@pytest.mark.parametrize(
    ("strides", "page_tokens", "num_heads", "count", "nbytes"),
    [
        ("BLHNC", 16, 4, 1, WHOLE.block_bytes),
        ("BLHNC", 16, 2, 28, 2 * 16 * ROW_BYTES),
        ("BLHNC", 32, 4, 28 * 4, 16 * ROW_BYTES),
        ("BLHNC", 8, 4, 28 * 4, 8 * ROW_BYTES),
        ("LBHNC", 16, 4, 28, 4 * 16 * ROW_BYTES),
        ("LBNHC", 16, 4, 28 * 4 * 16, ROW_BYTES),
        ("LBNHC", 16, 1, 28, 16 * ROW_BYTES),
    ],
)
def test_runs_are_as_long_as_both_sides_allow(
    strides: str, page_tokens: int, num_heads: int, count: int, nbytes: int
) -> None:
    tensors = empty_tensors(Case(WHOLE, page_tokens, PageOrder.ROWS, strides), num_heads)

    runs = Geometry(tensors, WHOLE).runs(range(28))

    assert len(runs) == count
    assert {run.nbytes for run in runs} == {nbytes}


def test_numbers_that_lie_apart_are_no_run() -> None:
    layout = KvLayout(layers=1, kv_heads=2, head_dim=4, dtype="float32")
    tensor = torch.zeros(3, 2, 8, 16).transpose(2, 3)

    assert Geometry([tensor], layout).runs(range(1)) == [ByteRun(0, 0, 4)]


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "first_head"), [(4, 0), (2, 2)])
def test_runs_lead_to_the_bytes_of_a_block(strides: str, page_tokens: int, num_heads: int, first_head: int) -> None:
    layout = KvLayout(layers=3, kv_heads=4, head_dim=4, dtype="float16")
    case = Case(layout, page_tokens, PageOrder.ROWS, strides)
    tensors = random_tensors(case, num_heads, 1)
    pages = random.Random(1).sample(range(NUM_PAGES), 4)
    expected = bytearray(layout.block_bytes)
    PagedKv(tensors, layout, PageOrder.ROWS, first_head=first_head).read(pages, 16, [expected])

    found = bytearray(layout.block_bytes)
    geometry = Geometry(tensors, layout, first_head=first_head)
    places = places_in(case, pages, [1])
    for layers in (range(2), range(2, 3)):
        for run in geometry.runs(layers):
            starts = geometry.part_offsets([0], run.block_bytes)
            for address, at in zip(geometry.addresses(places, run.device_bytes), starts, strict=True):
                found[at : at + run.nbytes] = ctypes.string_at(address, run.nbytes)

    assert found == expected
