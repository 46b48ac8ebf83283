"""Parts of attention whose keys were split among programs: which row a tile belongs to, and how its parts are joined.

The last program of a tile calls `joined_parts` for a few small parts; `join_kernel` joins many, in parallel.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of_tile(tile, starts_ptr, num_rows, TILE_QUERIES: tl.constexpr, HAS_ROW_TILES: tl.constexpr):
    """The row of a tile, and the row's first tile: rows begin at tile `start // TILE_QUERIES + row`."""
    low = tile * 0
    if HAS_ROW_TILES:
        low = tile
        first_tile = tile
    else:
        base = tl.load(starts_ptr)
        high = num_rows
        while high - low > 1:
            middle = (low + high) // 2
            is_before = (tl.load(starts_ptr + middle) - base) // TILE_QUERIES + middle <= tile
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle)
        first_tile = (tl.load(starts_ptr + low) - base) // TILE_QUERIES + low
    return low, first_tile


@triton.jit
def joined_parts(
    parts_ptr,
    best_ptr,
    total_ptr,
    first_place,
    num_parts,
    is_row,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """The weighted values and the sum of weights of a tile, over `num_parts` consecutive parts."""
    AT_ONCE: tl.constexpr = max(16384 // (TILE_ROWS * DIM), 1)  # as many as registers are free for
    dims = tl.arange(0, DIM)[None, :]
    is_dim = dims < HEAD_DIM
    values = tl.zeros((TILE_ROWS, DIM), dtype=tl.float32)
    best = tl.full((TILE_ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_ROWS,), dtype=tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        for other in tl.static_range(AT_ONCE):
            is_read = tl.where(first + other < num_parts, is_row, False)
            places = first_place + (first + other) * TILE_ROWS + tl.arange(0, TILE_ROWS)
            # Bypass the first-level cache, which may hold data from before another multiprocessor wrote it.
            part_best = tl.load(best_ptr + places, mask=is_read, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(total_ptr + places, mask=is_read, other=0.0, cache_modifier=".cg")
            part_ptrs = parts_ptr + places[:, None] * HEAD_DIM + dims
            part = tl.load(part_ptrs, mask=is_read[:, None] & is_dim, other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, part_best)
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
            decay = tl.exp2(best - shift)
            weight = tl.exp2(part_best - shift)
            values = values * decay[:, None] + part * weight[:, None]
            total = total * decay + part_total * weight
            best = new_best
    return values, total


# What differs from step to step must not make Triton compile anew in the middle of serving.
@triton.jit(do_not_specialize=["num_rows", "splits"], do_not_specialize_on_alignment=["starts_ptr"])
def join_kernel(
    out_ptr,
    parts_ptr,
    best_ptr,
    total_ptr,
    starts_ptr,
    num_rows,
    splits,
    out_token_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HAS_ROW_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """The parts of one query and one head, weighed by their largest scores, make its attention."""
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    tile_row = tl.program_id(2)
    row, first_tile = row_of_tile(tile, starts_ptr, num_rows, TILE_QUERIES, HAS_ROW_TILES)
    start = tl.load(starts_ptr + row)
    query = (tile - first_tile) * TILE_QUERIES + tile_row // GROUP
    if query >= tl.load(starts_ptr + row + 1) - start:
        return
    parts = tl.arange(0, MAX_SPLITS)
    is_part = parts < splits
    places = ((tile.to(tl.int64) * tl.num_programs(1) + kv_head) * splits + parts) * TILE_ROWS + tile_row
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    best = tl.load(best_ptr + places, mask=is_part, other=float("-inf"))
    highest = tl.max(best, 0)
    weights = tl.exp2(best - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights * tl.load(total_ptr + places, mask=is_part, other=0.0), 0)
    is_kept = is_part[:, None] & is_dim[None, :]
    values = tl.load(parts_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=is_kept, other=0.0)
    attended = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptrs = out_ptr + (start + query).to(tl.int64) * out_token_stride
    out_ptrs += (kv_head * GROUP + tile_row % GROUP) * out_head_stride + dims
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=is_dim)
