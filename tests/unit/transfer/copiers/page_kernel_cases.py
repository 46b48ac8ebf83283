"""The kernels over pages move what `PagedKv` moves: on a GPU where there is one, else in Triton's interpreter.

`test_page_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvtier.blocks.layout import KvLayout
from kvtier.transfer.copiers.cuda_copier import Way
from kvtier.transfer.copiers.geometry import INTEGERS, Geometry, PageOrder
from kvtier.transfer.copiers.page_kernels import PageMoves
from tests.support.fake_cuda import FakeCuda, check_against_twin
from tests.support.paged_kv import PagedKv
from tests.support.pages import NUM_PAGES, STRIDES, Case, moved, places_in, random_tensors

pytestmark = pytest.mark.sampled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _some_blocks(case: Case, seed: int) -> tuple[list[int], list[int]]:
    dice = random.Random(seed)
    num_pages = 2 if case.page_tokens > 32 else NUM_PAGES - 2
    pages = dice.sample(range(NUM_PAGES), num_pages)
    all_blocks = range(num_pages * case.page_tokens // case.layout.block_tokens)
    return pages, dice.sample(all_blocks, min(3, len(all_blocks)))


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("page_tokens", [8, 16, 128])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_tokens", "num_heads", "first_head"),
    [("bfloat16", 8, 16, 3, 0), ("float32", 5, 8, 2, 1), ("float8_e4m3fn", 4, 32, 1, 2)],
)
def test_gather_and_scatter(
    strides: str, page_tokens: int, dtype: str, head_dim: int, block_tokens: int, num_heads: int, first_head: int
) -> None:
    layout = KvLayout(layers=2, kv_heads=3, head_dim=head_dim, dtype=dtype, block_tokens=block_tokens)
    case = Case(layout, page_tokens, PageOrder.ROWS, strides)
    pages, blocks = _some_blocks(case, page_tokens)
    tensors = random_tensors(case, num_heads, 1)
    moves = PageMoves(Geometry(moved(tensors, DEVICE), layout, first_head=first_head))
    places = places_in(case, pages, blocks)
    heads = slice(first_head, first_head + num_heads)
    expected = [bytearray(layout.block_bytes) for _ in blocks]
    twin = PagedKv(tensors, layout, PageOrder.ROWS, first_head=first_head)
    for block, buffer in zip(blocks, expected, strict=True):
        twin.read(pages, block * block_tokens, [buffer])

    staging = moves.new_staging(len(blocks) + 1).fill_(7)
    moves.gather(moves.table(places), staging)

    for found, buffer in zip(staging.cpu(), expected, strict=False):
        assert torch.equal(found, torch.frombuffer(buffer, dtype=found.dtype).view(layout.shape)[:, heads])
    assert (staging[-1] == 7).all()

    others = random_tensors(case, num_heads, 2)
    theirs = moved([tensor.clone() for tensor in others] if strides == "layers apart" else others, DEVICE)
    expected_tensors = random_tensors(case, num_heads, 2)
    moves = PageMoves(Geometry(theirs, layout, first_head=first_head))
    moves.scatter(moves.table(places), staging)
    twin = PagedKv(expected_tensors, layout, PageOrder.ROWS, first_head=first_head)
    for block, buffer in zip(blocks, expected, strict=True):
        twin.write(pages, block * block_tokens, [buffer])
    integers = INTEGERS[layout.itemsize]
    assert all(
        torch.equal(one.cpu().view(integers), other.view(integers))
        for one, other in zip(theirs, expected_tensors, strict=True)
    )


def test_columns_may_lie_apart() -> None:
    tensor = torch.randn(NUM_PAGES, 2, 8, 16).transpose(2, 3)
    assert tensor.stride(3) != 1
    layout = KvLayout(layers=1, kv_heads=2, head_dim=4, dtype="float32")
    moves = PageMoves(Geometry(moved([tensor], DEVICE), layout))
    staging = moves.new_staging(1)

    moves.gather(moves.table([9]), staging)

    assert torch.equal(staging[0, 0].cpu().view(torch.float32), tensor[9])


def test_no_blocks_are_nothing() -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    moves = PageMoves(Geometry([torch.zeros(2, 1, 16, 8, device=DEVICE)], layout))
    staging = moves.new_staging(1).fill_(1)

    moves.gather(moves.table([]), staging)

    assert (staging == 1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same without fakes")
@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "pageable"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(("page_tokens", "num_heads", "first_head"), [(8, 3, 0), (32, 2, 1)])
def test_a_copier_by_way_of_staging(
    strides: str,
    page_tokens: int,
    num_heads: int,
    first_head: int,
    is_registered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda(monkeypatch)
    case = Case(KvLayout(layers=2, kv_heads=3, head_dim=4, dtype="float16"), page_tokens, PageOrder.ROWS, strides)

    check_against_twin(case, num_heads, first_head, Way.STAGED, is_registered=is_registered)
