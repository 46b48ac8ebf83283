"""An engine's pages, filled token by token: what copies are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.transfer.copiers.geometry import PageOrder
from kvtier.transfer.places import places_of

NUM_PAGES = 11
STRIDES = ("layers apart", "LBHNC", "LBNHC", "BLHNC")


@dataclass(frozen=True)
class Case:
    layout: KvLayout
    page_tokens: int
    order: PageOrder
    strides: str


def places_in(case: Case, pages: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """The arguments of copiers, for `blocks` of a sequence with these `pages`."""
    return places_of(pages, blocks, page_tokens=case.page_tokens, block_tokens=case.layout.block_tokens)


def empty_tensors(case: Case, num_heads: int) -> list[torch.Tensor]:
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


def token_of(case: Case, tensor: torch.Tensor, page: int, head: int, inside: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one token, as views of a layer's tensor."""
    dim, size = case.layout.head_dim, case.page_tokens
    if case.order is PageOrder.ROWS:
        return tensor[page, head, inside, :dim], tensor[page, head, inside, dim:]
    flat = tensor[page, head].view(-1)
    return flat[: dim * size].view(dim, size)[:, inside], flat[dim * size :].view(size, dim)[inside]


def put(case: Case, tensors: list[torch.Tensor], pages: list[int], key: torch.Tensor, value: torch.Tensor) -> None:
    """Write as an engine does, token by token: `key` and `value` are `(layers, heads, tokens, dim)`."""
    for layer, tensor in enumerate(tensors):
        for token in range(key.shape[2]):
            number, inside = divmod(token, case.page_tokens)
            for head in range(key.shape[1]):
                to_key, to_value = token_of(case, tensor, pages[number], head, inside)
                to_key.copy_(key[layer, head, token])
                to_value.copy_(value[layer, head, token])


def sequence(case: Case, seed: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Scattered pages, and K and V for as many tokens as they hold."""
    layout = case.layout
    num_pages = max(1, -(-2 * layout.block_tokens // case.page_tokens))
    pages = random.Random(seed).sample(range(1, NUM_PAGES), min(num_pages, NUM_PAGES - 1))
    tokens = len(pages) * case.page_tokens
    made = torch.Generator().manual_seed(seed)
    shape = (layout.layers, layout.kv_heads, tokens, layout.head_dim)
    key, value = (torch.randn(shape, generator=made).to(getattr(torch, layout.dtype)) for _ in range(2))
    return pages, key, value


def expected_block(layout: KvLayout, key: torch.Tensor, value: torch.Tensor, first_token: int) -> bytes:
    """The block as the format says: K then V of each token, tokens of each head, heads of each layer."""
    end = first_token + layout.block_tokens
    both = torch.cat([key[:, :, first_token:end], value[:, :, first_token:end]], dim=-1)
    return both.contiguous().view(torch.uint8).numpy().tobytes()


def random_tensors(case: Case, num_heads: int, seed: int) -> list[torch.Tensor]:
    """Like `empty_tensors`, filled with numbers."""
    made = torch.Generator().manual_seed(seed)
    tensors = empty_tensors(case, num_heads)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=made))
    return tensors


def moved(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The same on `device`, with the same strides; those of one storage are parts of one there too."""
    storages: dict[int, torch.Tensor] = {}
    on_device = []
    for tensor in tensors:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        flat = storages.setdefault(flat.data_ptr(), flat.to(device))
        on_device.append(flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return on_device
