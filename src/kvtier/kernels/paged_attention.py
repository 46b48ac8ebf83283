"""Attention over paged KV in Triton: one kernel for prefills, decodes and anything between.

`reference.paged_attention` is the twin and the definition. The query heads that share a KV head are rows of one
tile, so K and V are read once for all of them. Where tiles are too few to fill the GPU, as for a few queries behind a
long cached prefix, the keys of each tile are split among several programs. The last program of a tile to finish joins a
few small parts, in order; a second kernel joins many parts, in parallel (`attention_parts`).
The rows of a decode may be cut by `shares`, so that a long one among short ones has many programs.
Grids come from shapes alone: nothing waits for the device, and a CUDA graph can hold a launch. Addresses in the cache
are summed in 64 bits, for an arena exceeds 2**31 elements.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvtier.kernels import dependent_launch, tuning
from kvtier.kernels.attention_parts import join_kernel, joined_parts, row_of_tile
from kvtier.kernels.operands import operand, shared_bytes_of

# What differs from step to step must not make Triton compile anew in the middle of serving.
_VARYING = ["num_rows", "splits", "table_stride"]
_VARYING_ALIGNMENT = ["tables_ptr", "starts_ptr", "lengths_ptr", "shares_ptr"]


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_tokens: int,
    shares: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `reference.paged_attention`, for a `scale` above 0. Rows over `max_query_tokens` are computed wrongly.

    The rows may be some of a batch's: `query_starts` then begins at their first token, and only theirs are written.
    `counters` are int32 zeros, left at zero, which no other launch may use meanwhile: `tuning.MAX_SPLIT_TILES`, and
    with `shares`, as `paged_batch.cut` makes them for a batch of rows of one query each, one for each row and KV head.
    """
    kv_heads, head_dim = cache.shape[1], query.shape[2]
    assert query.stride(-1) == cache.stride(-1) == block_tables.stride(-1) == 1, "the last dimension must be dense"
    assert cache.shape[3] == 2 * head_dim, "the cache is of another head_dim"
    assert query.shape[1] % kv_heads == 0, "query heads share KV heads evenly"
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if kv_lengths.shape[0] and query.shape[0]:
        sizes = {
            "GROUP": query.shape[1] // kv_heads,
            "HEAD_DIM": head_dim,
            "DIM": max(triton.next_power_of_2(head_dim), 16),
        }
        log2_scale = scale * math.log2(math.e)
        _attend(
            query,
            cache,
            block_tables,
            query_starts,
            kv_lengths,
            counters,
            out,
            log2_scale,
            window or 0,
            max_query_tokens,
            shares,
            sizes,
        )
    return out


def _attend(
    query,
    cache,
    block_tables,
    query_starts,
    kv_lengths,
    counters,
    out,
    log2_scale,
    window,
    max_query_tokens,
    shares,
    sizes,
) -> None:
    num_rows, max_blocks = block_tables.shape
    kv_heads, block_tokens = cache.shape[1], cache.shape[2]
    tiles = tuning.attention_tiles(
        group=sizes["GROUP"],
        head_dim=sizes["DIM"],
        itemsize=query.element_size(),
        max_query_tokens=max_query_tokens,
        num_rows=num_rows * kv_heads,
    ).fitted(head_dim=sizes["DIM"], itemsize=query.element_size(), shared_bytes=shared_bytes_of(query.device))
    tile_queries = tiles.rows // sizes["GROUP"]
    has_row_tiles = max_query_tokens <= tile_queries
    # Each row has at most one partial tile, so this many are enough however the tokens are distributed.
    num_tiles = num_rows if has_row_tiles else query.shape[0] // tile_queries + num_rows
    max_kv_tokens = max_blocks * block_tokens
    if window:
        max_kv_tokens = min(max_kv_tokens, window + max_query_tokens - 1)
    has_shares = shares is not None
    if has_shares:
        assert has_row_tiles, "only rows of one query are cut by their lengths"
        splits, is_split, joins_last = 1, True, True
        grid = (kv_heads, shares.shape[0], 1)  # all heads of one share first: empty shares come last
    else:
        splits = tuning.splits(
            num_programs=num_tiles * kv_heads, max_query_tokens=max_query_tokens, max_kv_tokens=max_kv_tokens
        )
        is_split = splits > 1
        joins_last = is_split and tuning.joins_last(splits=splits, rows=tiles.rows)
        grid = (num_tiles, kv_heads, splits)
    assert not joins_last or num_tiles * kv_heads <= counters.shape[0], "the counters are too few"
    shape = (math.prod(grid), tiles.rows)
    parts = torch.empty((*shape, sizes["HEAD_DIM"]), dtype=torch.float32, device=query.device) if is_split else out
    best = torch.empty(shape, dtype=torch.float32, device=query.device) if is_split else out
    total = torch.empty(shape, dtype=torch.float32, device=query.device) if is_split else out
    _attend_kernel[grid](
        query,
        cache,
        out,
        parts,
        best,
        total,
        counters,
        block_tables,
        query_starts,
        kv_lengths,
        shares if has_shares else kv_lengths,
        num_rows,
        splits,
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
        BLOCK_TOKENS=block_tokens,
        WINDOW=window,
        # By default, tensor cores round float32 to 10 bits.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        OPERAND=operand(query.dtype),
        HAS_ROW_TILES=has_row_tiles,
        HAS_SHARES=has_shares,
        IS_SPLIT=is_split,
        JOINS_LAST=joins_last,
        TILE_ROWS=tiles.rows,
        TILE_KEYS=tiles.keys,
        LOOKS_AHEAD=tiles.looks_ahead,
        **dependent_launch.launch_options(query.device, is_wanted=tuning.DEPENDENT_ATTENTION),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_split_stages if is_split else tiles.num_stages,
        enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
    )
    if is_split and not joins_last:
        join_kernel[(num_tiles, kv_heads, tile_queries * sizes["GROUP"])](
            out,
            parts,
            best,
            total,
            query_starts,
            num_rows,
            splits,
            out.stride(0),
            out.stride(1),
            **sizes,
            HAS_ROW_TILES=has_row_tiles,
            MAX_SPLITS=tuning.joined_splits(splits),
            TILE_ROWS=tiles.rows,
            num_warps=tuning.JOIN_WARPS,
            enable_fp_fusion=tuning.FUSE_MULTIPLY_ADD,
        )


@triton.jit
def _attend_keys(
    values,
    best,
    total,
    query,
    query_positions,
    cache_ptr,
    table_ptr,
    first_key,
    end_key,
    next_ids,
    block_stride,
    token_stride,
    log2_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    LOOKS_AHEAD: tl.constexpr,
):
    """Fold keys `first_key:end_key` into (weighted values, largest score, sum of weights), scores in powers of two.

    Unless masked, every query sees all of these keys, a whole number of tiles. A key that no query sees
    is not loaded: it may be NaN, which no weight of zero would remove.
    """
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    for start in range(first_key, end_key, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        is_key = keys < end_key
        if LOOKS_AHEAD:
            block_ids = next_ids.to(tl.int64)
            next_ids = tl.load(table_ptr + (keys + TILE_KEYS) // BLOCK_TOKENS, mask=keys + TILE_KEYS < end_key, other=0)
        elif IS_MASKED:
            block_ids = tl.load(table_ptr + keys // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        else:
            block_ids = tl.load(table_ptr + keys // BLOCK_TOKENS).to(tl.int64)
        places = block_ids * block_stride + (keys % BLOCK_TOKENS) * token_stride
        key_ptrs = cache_ptr + places[None, :] + dims[:, None]
        value_ptrs = cache_ptr + places[:, None] + (HEAD_DIM + dims)[None, :]
        if IS_MASKED or HEAD_DIM != DIM:
            key = tl.load(key_ptrs, mask=is_key[None, :] & is_dim[:, None], other=0.0).to(OPERAND)
            value = tl.load(value_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0.0).to(OPERAND)
        else:
            key = tl.load(key_ptrs).to(OPERAND)
            value = tl.load(value_ptrs).to(OPERAND)

        scores = tl.dot(query, key, input_precision=PRECISION)
        if IS_MASKED:
            is_seen = is_key[None, :] & (keys[None, :] <= query_positions[:, None])
            if WINDOW > 0:
                is_seen = is_seen & (query_positions[:, None] - keys[None, :] < WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * log2_scale)
        shift = new_best
        if IS_MASKED:
            # A query that has seen no keys yet: -inf less -inf would be NaN.
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores * log2_scale - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, 1)
        values = values * decay[:, None]
        values = tl.dot(weights.to(OPERAND), value, values, input_precision=PRECISION)
        best = new_best
    return values, best, total


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING_ALIGNMENT)
def _attend_kernel(
    query_ptr,
    cache_ptr,
    out_ptr,
    parts_ptr,
    best_ptr,
    total_ptr,
    counters_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    shares_ptr,
    num_rows,
    splits,
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
    HAS_ROW_TILES: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    JOINS_LAST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    LOOKS_AHEAD: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """A tile of one row's queries, with all query heads of one KV head, over the keys they see or one part of them."""
    tl.static_assert(not LOOKS_AHEAD or TILE_ROWS < 64, "blocks are looked up ahead in one loop")
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    split = tl.program_id(2)
    is_over = False
    if HAS_SHARES:
        # All of it from one place: every later read waits for it.
        kv_head, kv_heads = tile.to(tl.int64), tl.num_programs(0)
        share = tl.program_id(1)
        share_ptr = shares_ptr + 4 * share
        row = tl.load(share_ptr)
        split = tl.load(share_ptr + 1)
        splits = tl.load(share_ptr + 2)
        num_tokens = tl.load(share_ptr + 3)
        is_over = row < 0
        row = tl.maximum(row, 0)
        tile, start, first_query, num_queries = row, row, 0, 1
    else:
        kv_head, kv_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
        if not HAS_ROW_TILES:
            tile = tl.num_programs(0) - 1 - tile  # the last tiles see most keys, and must not be left to the end
        row, first_tile = row_of_tile(tile, starts_ptr, num_rows, TILE_QUERIES, HAS_ROW_TILES)
        start = tl.load(starts_ptr + row)
        num_queries = tl.load(starts_ptr + row + 1) - start
        first_query = (tile - first_tile) * TILE_QUERIES
        num_tokens = tl.load(lengths_ptr + row)
    num_before = num_tokens - num_queries
    end_key = num_before + tl.minimum(first_query + TILE_QUERIES, num_queries)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(num_before + first_query - WINDOW + 1, 0)
    num_parts = 1
    if IS_SPLIT:
        num_keys = end_key - first_key
        split_keys = tl.cdiv(tl.cdiv(num_keys, splits), TILE_KEYS) * TILE_KEYS
        num_parts = tl.maximum(tl.cdiv(num_keys, tl.maximum(split_keys, 1)), 1)
        first_key += split * split_keys
        end_key = tl.minimum(first_key + split_keys, end_key)
    layer_ptr = cache_ptr + kv_head * head_stride
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    next_ids = 0
    if LOOKS_AHEAD:
        next_keys = first_key + tl.arange(0, TILE_KEYS)
        is_next = (next_keys >= 0) & (next_keys < end_key)  # an empty share may begin anywhere
        next_ids = tl.load(table_ptr + next_keys // BLOCK_TOKENS, mask=is_next, other=0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    if is_over or first_query >= num_queries or (JOINS_LAST and split >= num_parts):
        return

    tile_rows = tl.arange(0, TILE_ROWS)
    queries = first_query + tile_rows // GROUP
    heads = kv_head * GROUP + tile_rows % GROUP
    tokens = (start + queries).to(tl.int64)
    dims = tl.arange(0, DIM)
    is_row = (tile_rows < TILE_QUERIES * GROUP) & (queries < num_queries)
    is_kept = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_ptrs = query_ptr + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    query = tl.load(query_ptrs, mask=is_kept, other=0.0).to(OPERAND)

    values = tl.zeros((TILE_ROWS, DIM), dtype=tl.float32)
    best = tl.full((TILE_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_ROWS,), dtype=tl.float32)
    first_masked = first_key
    if WINDOW == 0 and TILE_ROWS >= 64:
        # Tiles of keys that even the first query sees need no mask. Few rows mask faster than they start a second loop.
        num_seen_by_all = tl.minimum(num_before + first_query + 1, end_key) - first_key
        first_masked = first_key + tl.maximum(num_seen_by_all, 0) // TILE_KEYS * TILE_KEYS
        values, best, total = _attend_keys(
            values,
            best,
            total,
            query,
            num_before + queries,
            layer_ptr,
            table_ptr,
            first_key,
            first_masked,
            next_ids,
            block_stride,
            token_stride,
            log2_scale,
            HEAD_DIM,
            DIM,
            BLOCK_TOKENS,
            WINDOW,
            PRECISION,
            OPERAND,
            TILE_KEYS,
            False,
            LOOKS_AHEAD,
        )
    values, best, total = _attend_keys(
        values,
        best,
        total,
        query,
        num_before + queries,
        layer_ptr,
        table_ptr,
        first_masked,
        end_key,
        next_ids,
        block_stride,
        token_stride,
        log2_scale,
        HEAD_DIM,
        DIM,
        BLOCK_TOKENS,
        WINDOW,
        PRECISION,
        OPERAND,
        TILE_KEYS,
        True,
        LOOKS_AHEAD,
    )
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    out_ptrs = out_ptr + (tokens * out_token_stride + heads * out_head_stride)[:, None] + dims[None, :]
    if IS_SPLIT:
        tile_number = tile.to(tl.int64) * kv_heads + kv_head
        if HAS_SHARES:  # the shares of a row are consecutive
            first_place = (kv_head * tl.num_programs(1) + share - split) * TILE_ROWS
        else:
            first_place = tile_number * splits * TILE_ROWS
        places = first_place + split * TILE_ROWS + tile_rows
        if num_parts > 1 or not JOINS_LAST:
            tl.store(parts_ptr + places[:, None] * HEAD_DIM + dims[None, :], values, mask=is_kept)
            tl.store(best_ptr + places, best, mask=is_row)
            tl.store(total_ptr + places, total, mask=is_row)
        if not JOINS_LAST:
            return
        if num_parts > 1:
            tl.debug_barrier()  # all threads have stored before one of them counts
            if tl.atomic_add(counters_ptr + tile_number, 1, sem="acq_rel") < num_parts - 1:
                return
            values, total = joined_parts(
                parts_ptr, best_ptr, total_ptr, first_place, num_parts, is_row, HEAD_DIM, DIM, TILE_ROWS
            )
            tl.store(counters_ptr + tile_number, 0)
    attended = values / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=is_kept)
