"""The kernels over pages move what `PagedKv` moves: on a GPU where there is one, else in Triton's interpreter.

`test_page_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvtier.blocks.layout import KvLayout
from kvtier.transfer.copiers.page_copier import INTEGERS
from kvtier.transfer.copiers.page_kernels import PageMoves
from kvtier.transfer.copiers.paged_kv import PagedKv, PageOrder
from tests.support.pages import NUM_PAGES, STRIDES, Case, moved, random_tensors

pytestmark = pytest.mark.sampled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """As whole numbers."""
    return moved([tensor.view(INTEGERS[tensor.itemsize]) for tensor in tensors], DEVICE)


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
    ours = _on_device(tensors)
    moves = PageMoves(ours, block_tokens)
    table = torch.tensor(moves.places(pages, blocks), device=DEVICE)
    heads = slice(first_head, first_head + num_heads)
    expected = [bytearray(layout.block_bytes) for _ in blocks]
    twin = PagedKv(tensors, layout, PageOrder.ROWS, first_head=first_head)
    for block, buffer in zip(blocks, expected, strict=True):
        twin.read(pages, block * block_tokens, [buffer])

    staging = torch.full((len(blocks) + 1, *moves.block_shape), 7, dtype=ours[0].dtype, device=DEVICE)
    moves.gather(table, staging)

    for found, buffer in zip(staging.cpu(), expected, strict=False):
        assert torch.equal(found, torch.frombuffer(buffer, dtype=found.dtype).view(layout.shape)[:, heads])
    assert (staging[-1] == 7).all()

    others = random_tensors(case, num_heads, 2)
    theirs = _on_device([tensor.clone() for tensor in others] if strides == "layers apart" else others)
    expected_tensors = random_tensors(case, num_heads, 2)
    moves = PageMoves(theirs, block_tokens)
    moves.scatter(torch.tensor(moves.places(pages, blocks), device=DEVICE), staging)
    twin = PagedKv(expected_tensors, layout, PageOrder.ROWS, first_head=first_head)
    for block, buffer in zip(blocks, expected, strict=True):
        twin.write(pages, block * block_tokens, [buffer])
    assert all(
        torch.equal(one.cpu(), other.view(one.dtype)) for one, other in zip(theirs, expected_tensors, strict=True)
    )


def test_columns_may_lie_apart() -> None:
    tensor = torch.randn(NUM_PAGES, 2, 8, 16).transpose(2, 3)
    assert tensor.stride(3) != 1
    moves = PageMoves(_on_device([tensor]), 16)
    staging = torch.zeros((1, *moves.block_shape), dtype=torch.int32, device=DEVICE)

    moves.gather(torch.tensor(moves.places([4, 9], [1]), device=DEVICE), staging)

    assert torch.equal(staging[0, 0].cpu().view(torch.float32), tensor[9])


def test_no_blocks_are_nothing() -> None:
    moves = PageMoves(_on_device([torch.zeros(2, 1, 16, 8)]), 16)
    staging = torch.ones((1, *moves.block_shape), dtype=torch.int32, device=DEVICE)

    moves.gather(torch.empty((0, 1), dtype=torch.int64, device=DEVICE), staging)

    assert (staging == 1).all()
