"""Pages of any size, order and strides hold the same tokens as blocks; ranks fill their own heads of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError
from kvtier.plugins.paged_kv import PagedKv, PageOrder

NUM_PAGES = 11
STRIDES = ("layers apart", "LBHNC", "LBNHC", "BLHNC")


@dataclass(frozen=True)
class _Case:
    layout: KvLayout
    page_tokens: int
    order: PageOrder
    strides: str


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
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
    return _Case(layout, page_tokens, order, strides)


def _empty_tensors(case: _Case, num_heads: int) -> list[torch.Tensor]:
    """One for each layer, logically `(pages, heads, tokens, 2 * dim)`, in memory as `strides` says."""
    layout, tokens = case.layout, case.page_tokens
    layers, width, dtype = layout.layers, 2 * layout.head_dim, getattr(torch, layout.dtype)
    if case.strides == "layers apart":
        return [torch.zeros(NUM_PAGES, num_heads, tokens, width, dtype=dtype) for _ in range(layers)]
    if case.strides == "LBHNC":
        return list(torch.zeros(layers, NUM_PAGES, num_heads, tokens, width, dtype=dtype))
    if case.strides == "LBNHC":
        return list(torch.zeros(layers, NUM_PAGES, tokens, num_heads, width, dtype=dtype).transpose(2, 3))
    return list(torch.zeros(NUM_PAGES, layers, num_heads, tokens, width, dtype=dtype).transpose(0, 1))


def _put(case: _Case, tensors: list[torch.Tensor], pages: list[int], key: torch.Tensor, value: torch.Tensor) -> None:
    """What an engine does, token by token: `key` and `value` are `(layers, heads, tokens, dim)`."""
    dim, size = case.layout.head_dim, case.page_tokens
    for layer, tensor in enumerate(tensors):
        for token in range(key.shape[2]):
            page, inside = pages[token // size], token % size
            for head in range(key.shape[1]):
                if case.order is PageOrder.ROWS:
                    tensor[page, head, inside, :dim] = key[layer, head, token]
                    tensor[page, head, inside, dim:] = value[layer, head, token]
                else:
                    flat = tensor[page, head].view(-1)
                    flat[: dim * size].view(dim, size)[:, inside] = key[layer, head, token]
                    flat[dim * size :].view(size, dim)[inside] = value[layer, head, token]


def _sequence(case: _Case, seed: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Scattered pages, and K and V for as many tokens as they hold."""
    layout = case.layout
    num_pages = max(1, -(-2 * layout.block_tokens // case.page_tokens))
    pages = random.Random(seed).sample(range(1, NUM_PAGES), min(num_pages, NUM_PAGES - 1))
    tokens = len(pages) * case.page_tokens
    made = torch.Generator().manual_seed(seed)
    shape = (layout.layers, layout.kv_heads, tokens, layout.head_dim)
    key, value = (torch.randn(shape, generator=made).to(getattr(torch, layout.dtype)) for _ in range(2))
    return pages, key, value


def _expected(layout: KvLayout, key: torch.Tensor, value: torch.Tensor, first_token: int) -> bytes:
    """The block as the format says: K then V of each token, tokens of each head, heads of each layer."""
    end = first_token + layout.block_tokens
    both = torch.cat([key[:, :, first_token:end], value[:, :, first_token:end]], dim=-1)
    return both.contiguous().view(torch.uint8).numpy().tobytes()


@given(case=_cases(), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_blocks_read_from_pages_are_those_of_the_format_and_come_back_the_same(case: _Case, seed: int) -> None:
    layout = case.layout
    pages, key, value = _sequence(case, seed)
    num_blocks = len(pages) * case.page_tokens // layout.block_tokens
    tensors = _empty_tensors(case, layout.kv_heads)
    _put(case, tensors, pages, key, value)

    blocks = [bytearray(layout.block_bytes) for _ in range(num_blocks)]
    PagedKv(tensors, layout, case.order).read(pages, 0, blocks)

    assert blocks == [_expected(layout, key, value, number * layout.block_tokens) for number in range(num_blocks)]
    others = _empty_tensors(case, layout.kv_heads)
    PagedKv(others, layout, case.order).write(pages, 0, blocks)
    num_tokens = num_blocks * layout.block_tokens
    expected = _empty_tensors(case, layout.kv_heads)
    _put(case, expected, pages, key[:, :, :num_tokens], value[:, :, :num_tokens])
    assert all(torch.equal(one, other) for one, other in zip(others, expected, strict=True))


@given(case=_cases(), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_what_two_ranks_write_together_one_reads_and_the_other_way_round(case: _Case, seed: int) -> None:
    layout = case.layout
    if layout.kv_heads == 1:
        return
    pages, key, value = _sequence(case, seed)
    if len(pages) * case.page_tokens < layout.block_tokens:
        return
    half = layout.kv_heads // 2
    block = bytearray(layout.block_bytes)
    for first in (0, half):
        tensors = _empty_tensors(case, half)
        _put(case, tensors, pages, key[:, first : first + half], value[:, first : first + half])
        rank = PagedKv(tensors, layout, case.order, first_head=first)
        assert not rank.is_whole
        rank.read(pages, 0, [block])

    assert block == _expected(layout, key, value, 0)
    tensors = _empty_tensors(case, half)
    PagedKv(tensors, layout, case.order, first_head=half).write(pages, 0, [block])
    again = bytearray(layout.block_bytes)
    PagedKv(tensors, layout, case.order, first_head=half).read(pages, 0, [again])
    there = torch.frombuffer(again, dtype=key.dtype).view(layout.shape)
    assert torch.equal(there[:, half:], torch.frombuffer(block, dtype=key.dtype).view(layout.shape)[:, half:])
    assert not there[:, :half].any(), "a rank touches no heads but its own"


def test_later_blocks_of_a_sequence_begin_inside_its_pages() -> None:
    case = _Case(KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32"), 32, PageOrder.TRANSPOSED_K, "LBHNC")
    pages, key, value = [3, 7], *(torch.randn(2, 2, 64, 4) for _ in range(2))
    tensors = _empty_tensors(case, 2)
    _put(case, tensors, pages, key, value)

    blocks = [bytearray(case.layout.block_bytes) for _ in range(2)]
    PagedKv(tensors, case.layout, case.order).read(pages, 16, blocks)

    assert blocks == [_expected(case.layout, key, value, first) for first in (16, 32)]


def test_layers_of_one_storage_are_copied_with_one_call_a_half() -> None:
    case = _Case(KvLayout(layers=3, kv_heads=1, head_dim=2, dtype="float32"), 16, PageOrder.ROWS, "BLHNC")

    assert len(PagedKv(_empty_tensors(case, 1), case.layout, case.order)._keys) == 1


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
        PagedKv(tensors, LAYOUT, order, first_head=first_head)
