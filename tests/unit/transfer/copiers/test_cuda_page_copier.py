"""What a copier of pages on a GPU decides without one: as which runs a block lies in the pages."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from kvtier.blocks.layout import KvLayout
from kvtier.transfer.copiers.cuda_page_copier import Run, runs_of
from kvtier.transfer.copiers.page_copier import INTEGERS
from kvtier.transfer.copiers.page_kernels import PageMoves
from kvtier.transfer.copiers.paged_kv import PagedKv, PageOrder
from tests.support.pages import NUM_PAGES, STRIDES, Case, empty_tensors, random_tensors

LAYOUT = KvLayout(layers=28, kv_heads=4, head_dim=128)
ROW_BYTES = 512


@pytest.mark.parametrize(
    ("strides", "page_tokens", "num_heads", "count", "nbytes"),
    [
        ("BLHNC", 16, 4, 1, LAYOUT.block_bytes),
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
    tensors = empty_tensors(Case(LAYOUT, page_tokens, PageOrder.ROWS, strides), num_heads)

    runs = runs_of(tensors, LAYOUT, first_head=0)

    assert len(runs) == count
    assert {run.nbytes for run in runs} == {nbytes}


def test_numbers_that_lie_apart_are_no_run() -> None:
    layout = KvLayout(layers=1, kv_heads=2, head_dim=4, dtype="float32")
    tensor = torch.zeros(3, 2, 8, 16).transpose(2, 3)

    assert runs_of([tensor], layout, 0) == [Run(0, 0, 4)]


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "first_head"), [(4, 0), (2, 2)])
def test_runs_lead_to_the_bytes_of_a_block(strides: str, page_tokens: int, num_heads: int, first_head: int) -> None:
    layout = KvLayout(layers=3, kv_heads=4, head_dim=4, dtype="float16")
    tensors = random_tensors(Case(layout, page_tokens, PageOrder.ROWS, strides), num_heads, 1)
    pages = random.Random(1).sample(range(NUM_PAGES), 4)
    expected = bytearray(layout.block_bytes)
    PagedKv(tensors, layout, PageOrder.ROWS, first_head=first_head).read(pages, 16, [expected])

    found = bytearray(layout.block_bytes)
    moves = PageMoves([tensor.view(INTEGERS[2]) for tensor in tensors], layout.block_tokens)
    part_bytes = moves.part_tokens * 2 * layout.head_dim * layout.itemsize
    for number, place in enumerate(moves.places(pages, [1])[0]):
        for run in runs_of(tensors, layout, first_head):
            piece = ctypes.string_at(moves.address_of(place) + run.device_bytes, run.nbytes)
            at = number * part_bytes + run.block_bytes
            found[at : at + run.nbytes] = piece

    assert found == expected
