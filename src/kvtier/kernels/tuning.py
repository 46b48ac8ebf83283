"""How the attention kernels are cut into tiles: everything a GPU's tuning may change, and nothing else.

All of it is chosen from numbers the host knows, so that choosing never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DOT_ROWS = 16
"""The fewest rows of a matrix product on tensor cores."""

DECODE_PROGRAMS = 528
"""Programs a decode is split into when it has fewer rows and heads than that: four for each of an H200's 132 SMs."""

MIN_SPLIT_TOKENS = 256
"""A split shorter than this costs more in the reduction than it gains."""

MAX_SPLITS = 64

REDUCE_WARPS = 4

WRITE_WARPS = 4

FUSE_MULTIPLY_ADD = True


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of one program: `rows` of queries (tokens times heads) against `keys` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(*, group: int, head_dim: int, itemsize: int, max_query_tokens: int) -> Tiles:
    """Tiles for many queries per row; `group` query heads share a KV head."""
    if itemsize == 4:
        most = Tiles(rows=32, keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    elif head_dim <= 64:
        most = Tiles(rows=128, keys=64, num_warps=4, num_stages=3)
    elif head_dim <= 128:
        most = Tiles(rows=128, keys=64, num_warps=8, num_stages=3)
    else:
        most = Tiles(rows=64, keys=32, num_warps=8, num_stages=2)
    rows = max(_power_of_two(group), min(most.rows, _power_of_two(group * max_query_tokens)), MIN_DOT_ROWS)
    return Tiles(rows, most.keys, most.num_warps, most.num_stages)


def decode_tiles(*, group: int, head_dim: int, itemsize: int) -> Tiles:
    """Tiles for one query per row: as few rows as its heads allow."""
    rows = max(_power_of_two(group), MIN_DOT_ROWS)
    if itemsize == 4:
        return Tiles(rows, keys=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    return Tiles(rows, keys=64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)


def decode_splits(*, num_rows: int, kv_heads: int, max_kv_tokens: int) -> int:
    """Into how many parts, a power of two, each context is split so that a small batch fills the GPU."""
    wanted = DECODE_PROGRAMS // max(num_rows * kv_heads, 1)
    useful = max_kv_tokens // MIN_SPLIT_TOKENS
    most = max(min(wanted, useful, MAX_SPLITS), 1)
    return 1 << (most.bit_length() - 1)


def _power_of_two(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()
