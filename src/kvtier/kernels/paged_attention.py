"""Attention over paged KV in Triton: one kernel for prefills and mixed rows, one for decodes whose context is split.

`reference.paged_attention` is the twin and says what holds. The query heads that share a KV head are rows of one
tile, so K and V are read once for all of them. Grids come from shapes alone: nothing waits for the device, and a
CUDA graph can hold a launch. Addresses in the cache are summed in 64 bits, for an arena exceeds 2**31 elements.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvtier.kernels import tuning

# What differs from step to step must not make Triton compile anew in the middle of serving.
_VARYING = ["num_rows", "table_stride"]
_VARYING_ALIGNMENT = ["tables_ptr", "starts_ptr", "lengths_ptr"]


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_tokens: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.paged_attention`. Rows of more than `max_query_tokens` queries are computed wrongly.

    The rows may be some of a batch's: `query_starts` then begins at their first token, and only theirs are written.
    """
    kv_heads, head_dim = cache.shape[1], query.shape[2]
    assert query.stride(-1) == cache.stride(-1) == block_tables.stride(-1) == 1, "the last dimension must be dense"
    assert cache.shape[3] == 2 * head_dim, "the cache is of another head_dim"
    assert query.shape[1] % kv_heads == 0, "query heads share KV heads evenly"
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if kv_lengths.shape[0] and query.shape[0]:
        launch = _decode if max_query_tokens == 1 else _prefill
        sizes = {
            "GROUP": query.shape[1] // kv_heads,
            "HEAD_DIM": head_dim,
            "DIM": max(triton.next_power_of_2(head_dim), 16),
            "BLOCK_TOKENS": cache.shape[2],
            "WINDOW": window or 0,
            # Tensor cores round float32 to 10 bits unless told not to.
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "OPERAND": _operand(query.dtype),
        }
        log2_scale = scale * math.log2(math.e)
        launch(query, cache, block_tables, query_starts, kv_lengths, out, log2_scale, max_query_tokens, sizes)
    return out


def _operand(dtype: torch.dtype) -> tl.dtype:
    """The dtype of the matrix products. Triton's interpreter would multiply bfloat16 as whole numbers."""
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def _prefill(query, cache, block_tables, query_starts, kv_lengths, out, log2_scale, max_query_tokens, sizes) -> None:
    tiles = tuning.prefill_tiles(
        group=sizes["GROUP"],
        head_dim=sizes["DIM"],
        itemsize=query.element_size(),
        max_query_tokens=max_query_tokens,
    )
    num_rows = kv_lengths.shape[0]
    # Each row has at most one tile that is not full, so this many are enough however the tokens are spread.
    num_tiles = query.shape[0] // (tiles.rows // sizes["GROUP"]) + num_rows
    _prefill_kernel[(num_tiles, cache.shape[1])](
        query,
        cache,
        out,
        block_tables,
        query_starts,
        kv_lengths,
        num_rows,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        block_tables.stride(0),
        log2_scale,
        **sizes,
        TILE_ROWS=tiles.rows,
        TILE_KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )


def _decode(query, cache, block_tables, query_starts, kv_lengths, out, log2_scale, max_query_tokens, sizes) -> None:
    num_rows, max_blocks = block_tables.shape
    kv_heads, heads, head_dim = cache.shape[1], query.shape[1], query.shape[2]
    tiles = tuning.decode_tiles(group=sizes["GROUP"], head_dim=sizes["DIM"], itemsize=query.element_size())
    max_kv_tokens = min(max_blocks * sizes["BLOCK_TOKENS"], sizes["WINDOW"] or max_blocks * sizes["BLOCK_TOKENS"])
    splits = tuning.decode_splits(num_rows=num_rows, kv_heads=kv_heads, max_kv_tokens=max_kv_tokens)
    is_split = splits > 1
    shape = (num_rows, heads, splits)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device) if is_split else out
    best = torch.empty(shape, dtype=torch.float32, device=query.device) if is_split else out
    total = torch.empty(shape, dtype=torch.float32, device=query.device) if is_split else out
    _decode_kernel[(num_rows, kv_heads, splits)](
        query,
        cache,
        out,
        parts,
        best,
        total,
        block_tables,
        query_starts,
        kv_lengths,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        block_tables.stride(0),
        log2_scale,
        **sizes,
        SPLITS=splits,
        TILE_ROWS=tiles.rows,
        TILE_KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )
    if is_split:
        _reduce_kernel[(num_rows, heads)](
            out,
            parts,
            best,
            total,
            query_starts,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            DIM=sizes["DIM"],
            SPLITS=splits,
            num_warps=tuning.REDUCE_WARPS,
            enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
        )


@triton.jit
def _attend_keys(
    query,
    query_positions,
    cache_ptr,
    table_ptr,
    first_key,
    end_key,
    block_stride,
    token_stride,
    log2_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Fold keys `first_key:end_key` into (weighted values, largest score, sum of weights), scores in powers of two.

    What is not a visible key is not loaded: it may be NaN, which no weight of zero would remove.
    """
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    values = tl.zeros((TILE_ROWS, DIM), dtype=tl.float32)
    best = tl.full((TILE_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_ROWS,), dtype=tl.float32)
    for start in range(first_key, end_key, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        is_key = keys < end_key
        block_ids = tl.load(table_ptr + keys // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        places = block_ids * block_stride + (keys % BLOCK_TOKENS) * token_stride
        key_ptrs = cache_ptr + places[None, :] + dims[:, None]
        key = tl.load(key_ptrs, mask=is_key[None, :] & is_dim[:, None], other=0.0).to(OPERAND)
        value_ptrs = cache_ptr + places[:, None] + (HEAD_DIM + dims)[None, :]
        value = tl.load(value_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0).to(OPERAND)

        scores = tl.dot(query, key, input_precision=PRECISION) * log2_scale
        is_seen = is_key[None, :] & (keys[None, :] <= query_positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (query_positions[:, None] - keys[None, :] < WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_best = tl.maximum(best, tl.max(scores, 1))
        # A query that has seen nothing yet: -inf less -inf would be NaN.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, 1)
        values = values * decay[:, None] + tl.dot(weights.to(OPERAND), value, input_precision=PRECISION)
        best = new_best
    return values, best, total


@triton.jit
def _row_of_tile(tile, starts_ptr, num_rows, TILE_QUERIES: tl.constexpr):
    """The row a tile belongs to, and the row's first tile: rows begin at tile `start // TILE_QUERIES + row`."""
    base = tl.load(starts_ptr)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(starts_ptr + middle) - base) // TILE_QUERIES + middle
        is_before = first_tile <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low, (tl.load(starts_ptr + low) - base) // TILE_QUERIES + low


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_ALIGNMENT)
def _prefill_kernel(
    query_ptr,
    cache_ptr,
    out_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    num_rows,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    log2_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """A tile of one row's queries, with all query heads of one KV head, over all keys they see."""
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row, first_tile = _row_of_tile(tile, starts_ptr, num_rows, TILE_QUERIES)
    start = tl.load(starts_ptr + row)
    num_queries = tl.load(starts_ptr + row + 1) - start
    first_query = (tile - first_tile) * TILE_QUERIES
    if first_query >= num_queries:
        return

    tile_rows = tl.arange(0, TILE_ROWS)
    queries = first_query + tile_rows // GROUP
    heads = kv_head * GROUP + tile_rows % GROUP
    tokens = (start + queries).to(tl.int64)
    dims = tl.arange(0, DIM)
    is_kept = (tile_rows < TILE_QUERIES * GROUP) & (queries < num_queries)
    is_kept = is_kept[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptrs = query_ptr + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    query = tl.load(query_ptrs, mask=is_kept, other=0.0).to(OPERAND)

    num_before = tl.load(lengths_ptr + row) - num_queries
    end_key = num_before + tl.minimum(first_query + TILE_QUERIES, num_queries)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(num_before + first_query - WINDOW + 1, 0)
    values, _, total = _attend_keys(
        query,
        num_before + queries,
        cache_ptr + kv_head * head_stride,
        tables_ptr + row.to(tl.int64) * table_stride,
        first_key,
        end_key,
        block_stride,
        token_stride,
        log2_scale,
        HEAD_DIM,
        DIM,
        BLOCK_TOKENS,
        WINDOW,
        PRECISION,
        OPERAND,
        TILE_ROWS,
        TILE_KEYS,
    )
    attended = values / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + (tokens * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=is_kept)


@triton.jit(do_not_specialize=_VARYING[1:], do_not_specialize_on_alignment=_VARYING_ALIGNMENT)
def _decode_kernel(
    query_ptr,
    cache_ptr,
    out_ptr,
    parts_ptr,
    best_ptr,
    total_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    log2_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """One row's only query, with all query heads of one KV head, over one part of its context."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    token = tl.load(starts_ptr + row).to(tl.int64)
    if tl.load(starts_ptr + row + 1) == token:
        return

    kv_length = tl.load(lengths_ptr + row)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(kv_length - WINDOW, 0)
    split_tokens = tl.cdiv(tl.cdiv(kv_length - first_key, SPLITS), TILE_KEYS) * TILE_KEYS
    first_key += split * split_tokens
    end_key = tl.minimum(first_key + split_tokens, kv_length)

    tile_rows = tl.arange(0, TILE_ROWS)
    heads = kv_head * GROUP + tile_rows
    dims = tl.arange(0, DIM)
    is_head = tile_rows < GROUP
    is_kept = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptrs = query_ptr + token * query_token_stride + (heads * query_head_stride)[:, None] + dims[None, :]
    query = tl.load(query_ptrs, mask=is_kept, other=0.0).to(OPERAND)
    values, best, total = _attend_keys(
        query,
        tl.full((TILE_ROWS,), 0, dtype=tl.int32) + kv_length - 1,
        cache_ptr + kv_head * head_stride,
        tables_ptr + row * table_stride,
        first_key,
        end_key,
        block_stride,
        token_stride,
        log2_scale,
        HEAD_DIM,
        DIM,
        BLOCK_TOKENS,
        WINDOW,
        PRECISION,
        OPERAND,
        TILE_ROWS,
        TILE_KEYS,
    )
    if SPLITS == 1:
        attended = values / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = out_ptr + token * out_token_stride + (heads * out_head_stride)[:, None] + dims[None, :]
        tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=is_kept)
    else:
        num_heads = tl.num_programs(1) * GROUP
        parts = (row * num_heads + heads) * SPLITS + split
        tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], values, mask=is_kept)
        tl.store(best_ptr + parts, best, mask=is_head)
        tl.store(total_ptr + parts, total, mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["starts_ptr"])
def _reduce_kernel(
    out_ptr,
    parts_ptr,
    best_ptr,
    total_ptr,
    starts_ptr,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of one row and one head, weighed by their largest scores, make the row's attention."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = tl.load(starts_ptr + row).to(tl.int64)
    if tl.load(starts_ptr + row + 1) == token:
        return
    parts = (row * tl.num_programs(1) + head) * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    best = tl.load(best_ptr + parts)
    highest = tl.max(best, 0)
    weights = tl.exp2(best - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights * tl.load(total_ptr + parts), 0)
    values = tl.load(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
    attended = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + token * out_token_stride + head * out_head_stride + dims
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=is_dim)
