"""Attention of long chunks of prompts: their KV is copied out of its blocks first, and then read in large tiles.

Every tile of queries reads the same keys again, so one more copy of them costs next to nothing, and what lies in one
piece is loaded by the GPU's bulk copies (tensor descriptors) instead of address by address. The twin is
`reference.paged_attention`. The copy lives for one call.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvtier.kernels import tuning
from kvtier.kernels.attention_parts import row_of_tile
from kvtier.kernels.operands import operand, shared_bytes_of


def gathered_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    gather_starts: torch.Tensor,
    *,
    num_gathered_tokens: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Like `reference.paged_attention` without a window, for a `scale` above 0 and heads of a power of two, into `out`.

    The rows may be some of a batch's: `query_starts` then begins at their first token, and only theirs are written.
    Row r's keys are copied to places `gather_starts[r]` and on, which are multiples of `tuning.GATHER_TOKENS`, as is
    `num_gathered_tokens`, where the last row's end.
    """
    kv_heads, block_tokens, head_dim = cache.shape[1], cache.shape[2], query.shape[2]
    num_rows = kv_lengths.shape[0]
    assert query.stride(-1) == cache.stride(-1) == block_tables.stride(-1) == 1, "the last dimension must be dense"
    assert cache.shape[3] == 2 * head_dim, "the cache is of another head_dim"
    gathered = torch.empty((kv_heads, num_gathered_tokens, 2 * head_dim), dtype=cache.dtype, device=cache.device)
    _gather_kernel[(num_gathered_tokens // tuning.GATHER_TOKENS, kv_heads)](
        cache,
        gathered,
        block_tables,
        kv_lengths,
        gather_starts,
        num_rows,
        num_gathered_tokens,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        block_tables.stride(0),
        KV_DIM=2 * head_dim,
        BLOCK_TOKENS=block_tokens,
        TOKENS=tuning.GATHER_TOKENS,
        num_warps=tuning.GATHER_WARPS,
    )
    group = query.shape[1] // kv_heads
    tiles = tuning.gathered_tiles(group=group, head_dim=head_dim).fitted(
        head_dim=head_dim, itemsize=query.element_size(), shared_bytes=shared_bytes_of(query.device)
    )
    num_tiles = query.shape[0] // (tiles.rows // group) + num_rows
    _attend_kernel[(num_tiles, kv_heads)](
        query,
        TensorDescriptor.from_tensor(gathered.view(-1, 2 * head_dim), [tiles.keys, head_dim]),
        out,
        query_starts,
        kv_lengths,
        gather_starts,
        num_rows,
        num_gathered_tokens,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        scale * math.log2(math.e),
        GROUP=group,
        HEAD_DIM=head_dim,
        OPERAND=operand(query.dtype),
        TILE_ROWS=tiles.rows,
        TILE_KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_gathered_tokens", "table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr", "gather_starts_ptr"],
)
def _gather_kernel(
    cache_ptr,
    gathered_ptr,
    tables_ptr,
    lengths_ptr,
    gather_starts_ptr,
    num_rows,
    num_gathered_tokens,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    KV_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some tokens of one row and one KV head. Zeros follow the row's end: unseen tokens must not be NaN."""
    start = tl.program_id(0) * TOKENS
    kv_head = tl.program_id(1).to(tl.int64)
    low = start * 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(gather_starts_ptr + middle) <= start
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    keys = start - tl.load(gather_starts_ptr + low) + tl.arange(0, TOKENS)
    is_key = keys < tl.load(lengths_ptr + low)
    table_ptr = tables_ptr + low.to(tl.int64) * table_stride
    block_ids = tl.load(table_ptr + keys // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
    places = block_ids * block_stride + kv_head * head_stride + (keys % BLOCK_TOKENS) * token_stride
    dims = tl.arange(0, KV_DIM)
    kv = tl.load(cache_ptr + places[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
    targets = (kv_head * num_gathered_tokens + start + tl.arange(0, TOKENS)) * KV_DIM
    tl.store(gathered_ptr + targets[:, None] + dims[None, :], kv)


@triton.jit
def _attend_keys(
    values,
    best,
    total,
    query,
    query_positions,
    gathered,
    first_place,
    first_key,
    end_key,
    log2_scale,
    HEAD_DIM: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """As in `paged_attention`: fold keys `first_key:end_key`; without a mask, every query sees all of them."""
    for start in range(first_key, end_key, TILE_KEYS):
        key = gathered.load([first_place + start, 0]).to(OPERAND)
        scores = tl.dot(query, key.T)
        if IS_MASKED:
            keys = start + tl.arange(0, TILE_KEYS)
            scores = tl.where(keys[None, :] <= query_positions[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * log2_scale)
        weights = tl.exp2(scores * log2_scale - new_best[:, None])
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weights, 1)
        values = values * decay[:, None]
        value = gathered.load([first_place + start, HEAD_DIM]).to(OPERAND)
        values = tl.dot(weights.to(OPERAND), value, values)
        best = new_best
    return values, best, total


@triton.jit(
    do_not_specialize=["num_rows", "num_gathered_tokens"],
    do_not_specialize_on_alignment=["starts_ptr", "lengths_ptr", "gather_starts_ptr"],
)
def _attend_kernel(
    query_ptr,
    gathered,
    out_ptr,
    starts_ptr,
    lengths_ptr,
    gather_starts_ptr,
    num_rows,
    num_gathered_tokens,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    log2_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """A tile of one row's queries, with all query heads of one KV head, over all keys they see.

    Each query sees the row's first key in the first tile, so the largest score is always of a real key.
    """
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see most keys, and must not be left to the end
    kv_head = tl.program_id(1)
    row, first_tile = row_of_tile(tile, starts_ptr, num_rows, TILE_QUERIES, False)
    start = tl.load(starts_ptr + row)
    num_queries = tl.load(starts_ptr + row + 1) - start
    first_query = (tile - first_tile) * TILE_QUERIES
    if first_query >= num_queries:
        return

    tile_rows = tl.arange(0, TILE_ROWS)
    queries = first_query + tile_rows // GROUP
    heads = kv_head * GROUP + tile_rows % GROUP
    tokens = (start + queries).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    is_kept = ((tile_rows < TILE_QUERIES * GROUP) & (queries < num_queries))[:, None]
    query_ptrs = query_ptr + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    query = tl.load(query_ptrs, mask=is_kept, other=0.0).to(OPERAND)

    num_before = tl.load(lengths_ptr + row) - num_queries
    end_key = num_before + tl.minimum(first_query + TILE_QUERIES, num_queries)
    first_masked = (num_before + first_query + 1) // TILE_KEYS * TILE_KEYS
    first_place = kv_head * num_gathered_tokens + tl.load(gather_starts_ptr + row)
    positions = num_before + queries
    values = tl.zeros((TILE_ROWS, HEAD_DIM), dtype=tl.float32)
    best = tl.full((TILE_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_ROWS,), dtype=tl.float32)
    values, best, total = _attend_keys(
        values,
        best,
        total,
        query,
        positions,
        gathered,
        first_place,
        0,
        first_masked,
        log2_scale,
        HEAD_DIM,
        OPERAND,
        TILE_KEYS,
        False,
    )
    values, best, total = _attend_keys(
        values,
        best,
        total,
        query,
        positions,
        gathered,
        first_place,
        first_masked,
        end_key,
        log2_scale,
        HEAD_DIM,
        OPERAND,
        TILE_KEYS,
        True,
    )
    attended = values / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without KV gets zeros
    out_ptrs = out_ptr + (tokens * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=is_kept)
