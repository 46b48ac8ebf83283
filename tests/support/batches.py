"""Builds batches over a scattered cache, and attends to them one query, one head and one key at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.kernels.backend import Backend
from kvtier.kernels.paged_batch import PagedArrays, PagedBatch, PagedRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")

torch.set_num_threads(1)  # the work is tiny: threads would only wait for each other

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties given by the model."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_tokens: int = 8
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    """A batch whose earlier KV is in the cache; every other slot of the cache is NaN."""

    shape: Shape
    rows: tuple[PagedRow, ...]
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: list[torch.Tensor]
    """Each row's whole context, `(kv_tokens, kv_heads, head_dim)`."""
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def batch(self, backend: Backend, num_padding_rows: int = 0) -> PagedBatch:
        block_tokens = self.shape.block_tokens
        arrays = PagedArrays.lay_out(self.rows, block_tokens=block_tokens, num_padding_rows=num_padding_rows)
        return arrays.upload(DEVICE, backend)


_SHAPE = Shape()


def make_case(lengths: Sequence[tuple[int, int]], shape: Shape = _SHAPE, seed: int = 0) -> Case:
    """Rows of `(query_tokens, kv_tokens)`, their blocks in random order in the second layer of three."""
    generator = torch.Generator().manual_seed(seed)
    order = random.Random(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype)

    need = [-(-kv_tokens // shape.block_tokens) for _, kv_tokens in lengths]
    num_blocks = sum(need) + 3
    free = order.sample(range(num_blocks), num_blocks)
    arena = torch.full((num_blocks, 3, shape.kv_heads, shape.block_tokens, 2 * shape.head_dim), NAN, dtype=shape.dtype)
    cache = arena[:, 1]
    rows, keys, values = [], [], []
    for (query_tokens, kv_tokens), count in zip(lengths, need, strict=True):
        block_ids = [free.pop() for _ in range(count)]
        rows.append(PagedRow(block_ids, query_tokens, kv_tokens))
        keys.append(normal(kv_tokens, shape.kv_heads, shape.head_dim))
        values.append(normal(kv_tokens, shape.kv_heads, shape.head_dim))
        for position in range(kv_tokens - query_tokens):
            block_id, offset = block_ids[position // shape.block_tokens], position % shape.block_tokens
            cache[block_id, :, offset] = torch.cat((keys[-1][position], values[-1][position]), -1)
    num_tokens = sum(query_tokens for query_tokens, _ in lengths)

    def new(contexts: list[torch.Tensor]) -> torch.Tensor:
        empty = torch.empty(0, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
        parts = [context[len(context) - count :] for context, (count, _) in zip(contexts, lengths, strict=True)]
        return torch.cat([empty, *parts]).to(DEVICE)

    return Case(
        shape=shape,
        rows=tuple(rows),
        cache=arena.to(DEVICE)[:, 1],
        query=normal(num_tokens, shape.heads, shape.head_dim).to(DEVICE),
        key=new(keys),
        value=new(values),
        keys=keys,
        values=values,
    )


def dense_attention(case: Case, window: int | None) -> torch.Tensor:
    """The definition, in float64 and without a thought for speed."""
    shape, attended, token = case.shape, [], 0
    query = case.query.cpu().double()
    for row, keys, values in zip(case.rows, case.keys, case.values, strict=True):
        for position in range(row.kv_tokens - row.query_tokens, row.kv_tokens):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(shape.heads):
                kv_head = head // (shape.heads // shape.kv_heads)
                seen = keys[first : position + 1, kv_head].double()
                weights = torch.softmax(seen @ query[token, head] * case.scale, 0)
                attended.append(weights @ values[first : position + 1, kv_head].double())
            token += 1
    empty = torch.empty(0, shape.head_dim, dtype=torch.float64)
    return torch.cat([empty, *(one[None] for one in attended)]).view(-1, shape.heads, shape.head_dim)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=tolerance)
