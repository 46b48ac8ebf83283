"""How the kernels are cut into tiles: everything a GPU's tuning may change, and nothing else.

All of it is chosen from numbers the host knows, so that choosing never waits for the device. The numbers are those of
an H200 (docs/design/performance.md); on a GPU of less shared memory, tiles shrink until they fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_MIN_STAGES = 2
_MIN_KEYS = 16

MIN_DOT_ROWS = 16
"""The fewest rows of a matrix product on tensor cores."""

FULL_PROGRAMS = 1056
"""Fewer tiles than this are split into about this many programs: eight for each of an H200's 132 SMs."""

FULL_DECODE_PROGRAMS = 264
"""The same for decodes, whose programs are larger: two for each SM, so that all run at once."""

MANY_DECODES = 128
"""From this many rows of one query times KV heads on, programs have eight warps instead of four."""

MIN_SPLIT_TOKENS = 128
"""A shorter split costs more in the joining than it gains."""

MAX_SPLITS = 64
FEW_SPLITS = 16

MAX_SPLIT_TILES = FULL_PROGRAMS // 2
"""Limit on the number of tiles that are split."""

MAX_LAST_SPLITS = 20
"""Up to this many parts are joined by the last program to end, alone; more by a kernel; with 0, always by a kernel."""

NEXT_KINDS = (2, FEW_SPLITS + 1, MAX_LAST_SPLITS + 1)
"""From this many parts on, other kernels cut or join."""

MAX_ROW_SHARES = 32
"""Most shares of a decode row: the last program to end joins them alone."""

MAX_LAST_ROWS = 32
"""The same for tiles of up to this many rows, whose parts are small."""

DEPENDENT_ATTENTION = True
"""Whether attention, and the writing of its KV, may start while the previous kernel ends."""

GATHER_TOKENS = 128
"""Copied KV begins at a multiple of this: no tile of keys is longer."""

MAX_GATHERED_BYTES = 256 << 20
"""No more is copied in one call. Less than a step of a few thousand tokens takes for its widest layer."""

MIN_GATHER_QUERIES = 192
"""Average number of queries that must read each key for the copy to pay."""

JOIN_WARPS = 4

GATHER_WARPS = 4

WRITE_WARPS = 4

FUSE_MULTIPLY_ADD = True

HAS_QUANTIZED_PRODUCTS = True
"""Whether models use kernels of ours for products with quantised weights."""

HAS_FEW_TOKEN_PRODUCTS = True
"""Whether models use a kernel of ours for products of a few tokens with weights in 16 bits."""

DEPENDENT_LAUNCHES = True
"""Whether norms, gates and quantisation start while the kernel before them ends, and let the next one start early.

For products, their tiles say so."""

NORMS_QUANTIZE = True
"""Whether norms before layers with weights in 8 bits write only rows in 8 bits, with their scales."""

MAX_FEW_TOKENS = 64
"""Products of up to this many tokens with quantised weights read each weight once, in our own kernel."""

MAX_OWN_PEAKS = 4 * 4096
"""Up to this many inputs, every program finds the maximum of each row itself. More are quantised by a kernel first."""

PEAKS_AT_ONCE = 2048
"""More would take registers from other programs: gate and up run five programs per multiprocessor."""

MULTIPROCESSORS = 132

SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor. Each program takes a KB on top of its own."""

FP8_PROGRAMS = 4 * MULTIPROCESSORS
"""A product with weights in 8 bits is split into about this many programs, if all of them run at once."""

PLAIN_PROGRAMS = 3 * MULTIPROCESSORS
"""The same for 16 bits."""

MAX_PLAIN_TOKENS = 16
"""Products of up to this many tokens with weights in 16 bits use our own kernel."""

INT4_PROGRAMS = 5 * MULTIPROCESSORS
"""The same for 4 bits. These are bound by their instructions, so they have to be spread more evenly."""

MIN_PRODUCT_STEPS = 2
"""A share of fewer steps costs more in the joining than it gains."""

MAX_PRODUCT_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of one program: `rows` of queries (tokens times heads) against `keys` at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    num_split_stages: int = 2
    """Stages for a part of the keys, which is short."""
    looks_ahead: bool = False
    """Whether the blocks of the next keys are looked up while these are computed, so that all stages hold KV."""

    def fitted(self, *, head_dim: int, itemsize: int, shared_bytes: int) -> Tiles:
        """This tile, or one with fewer stages and keys, so that queries and all stages of keys and values fit."""
        tiles = self
        while tiles.shared_bytes(head_dim, itemsize) > shared_bytes:
            if max(tiles.num_stages, tiles.num_split_stages) > _MIN_STAGES:
                tiles = replace(
                    tiles,
                    num_stages=max(tiles.num_stages - 1, _MIN_STAGES),
                    num_split_stages=max(tiles.num_split_stages - 1, _MIN_STAGES),
                )
            elif tiles.keys > _MIN_KEYS:
                tiles = replace(tiles, keys=tiles.keys // 2)
            else:
                break
        return tiles

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """An upper bound of what a program holds at once."""
        stages = max(self.num_stages, self.num_split_stages)
        return (self.rows + 2 * self.keys * stages) * head_dim * itemsize


def attention_tiles(*, group: int, head_dim: int, itemsize: int, max_query_tokens: int, num_rows: int) -> Tiles:
    """Tiles for rows of up to `max_query_tokens` queries; `group` query heads share a KV head.

    `num_rows` counts each row once for every KV head. There are few kinds, since each is compiled: for one query in few
    or of many rows, for a few queries, for many.
    """
    one = max(_power_of_two(group), MIN_DOT_ROWS)
    wanted = group * max_query_tokens
    if itemsize == 4:
        keys = 32 if head_dim <= 128 else 16
        return Tiles(one if wanted <= one else max(one, 32), keys, num_warps=4, num_stages=2)
    if wanted <= one:
        keys = min(max(8192 // head_dim, 32), 128 if one <= 32 else 64)
        warps = 8 if num_rows >= MANY_DECODES and one <= 32 else 4
        return Tiles(one, keys, num_warps=warps, num_stages=3, num_split_stages=3, looks_ahead=one <= 32)
    if head_dim > 128:
        return Tiles(max(one, 64), keys=32, num_warps=8, num_stages=2)
    if wanted <= 64:
        return Tiles(max(one, 64), keys=64, num_warps=4, num_stages=3)
    return Tiles(max(one, 128), keys=64, num_warps=4, num_stages=3)


def gathered_tiles(*, group: int, head_dim: int) -> Tiles:
    """Tiles of a chunk of a prompt whose KV lies in one piece, in 16 bits."""
    return Tiles(max(_power_of_two(group), 128), keys=64, num_warps=4, num_stages=2 if head_dim > 64 else 3)


def gathers(*, head_dim: int, itemsize: int, gathered_bytes: int, queries_per_key: float) -> bool:
    """Whether to copy the KV of prompts into one piece before their chunks attend."""
    return (
        itemsize == 2
        and head_dim in (64, 128)
        and 0 < gathered_bytes <= MAX_GATHERED_BYTES
        and queries_per_key >= MIN_GATHER_QUERIES
    )


def splits(*, num_programs: int, max_query_tokens: int, max_kv_tokens: int) -> int:
    """The number of parts of each tile's keys, so that `num_programs` tiles fill the GPU."""
    full = FULL_DECODE_PROGRAMS if max_query_tokens == 1 else FULL_PROGRAMS
    useful = max_kv_tokens // MIN_SPLIT_TOKENS
    return max(min(full // max(num_programs, 1), useful, MAX_SPLITS), 1)


def decode_shares(kv_heads: int) -> int:
    """The number of shares of the keys of a decode's rows, each for all KV heads."""
    return max(FULL_DECODE_PROGRAMS // kv_heads, 1)


def has_shares(*, num_rows: int, kv_heads: int) -> bool:
    """Whether the rows of a decode are cut by their lengths.

    Very few rows would have so many shares that a kernel joins them faster than the last program to end.
    """
    return num_rows * MAX_LAST_SPLITS >= decode_shares(kv_heads)


def joins_last(*, splits: int, rows: int) -> bool:
    """Whether the last program of a tile of `rows` to end joins its parts, of which there are up to `splits`."""
    return splits <= MAX_LAST_SPLITS and rows <= MAX_LAST_ROWS


def kind_of_splits(count: int) -> int:
    """A number for the kernels that cut keys into up to `count` parts, and join them: equal for equal kernels."""
    return sum(count >= least for least in NEXT_KINDS)


def joined_splits(count: int) -> int:
    """The number of splits for which the kernel that joins `count` of them is compiled: one of two."""
    return _power_of_two(FEW_SPLITS if count <= FEW_SPLITS else MAX_SPLITS)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The work of one program of a product: `rows` of the weight, `step` inputs at a time, one of `splits` shares."""

    rows: int
    step: int
    splits: int
    num_warps: int
    num_stages: int
    dependent_launch: bool = False
    """Whether the kernel may start while the previous one ends."""

    def fitted(self, *, stage_bytes: int, shared_bytes: int) -> ProductTile:
        """This tile, or one with fewer stages, so that all stages and one more, for the computation, fit."""
        stages = min(self.num_stages, shared_bytes // stage_bytes - 1)
        return replace(self, num_stages=max(stages, _MIN_STAGES))


def few_tokens(num_tokens: int) -> int:
    """The number of tokens for which a product of `num_tokens` is compiled."""
    return max(_power_of_two(num_tokens), MIN_DOT_ROWS)


def copied_tokens(num_tokens: int) -> int:
    """The number of tokens whose inputs a product copies ahead of their use. Fewer than four are not copied so."""
    return 4 if num_tokens <= 4 else few_tokens(num_tokens)


def peak_rows(num_tokens: int) -> int:
    """The number of rows for which the search for the largest numbers is compiled."""
    return 1 if num_tokens == 1 else 4 if num_tokens <= 4 else few_tokens(num_tokens)


def fp8_tile(*, num_tokens: int, inputs: int, outputs: int, input_bytes: int) -> ProductTile:
    """The tile of a product of `num_tokens`, of numbers of `input_bytes`, with a weight (outputs, inputs) in 8 bits."""
    rows, step = (64 if num_tokens <= MIN_DOT_ROWS else 128), 128
    copied = few_tokens(num_tokens) if input_bytes == 1 else copied_tokens(num_tokens)
    stage_bytes = step * (rows + input_bytes * copied)
    num_tiles = _ceil_div(outputs, rows)
    num_programs = min(FP8_PROGRAMS, programs_at_once(3 * stage_bytes))
    splits = product_splits(num_tiles, _ceil_div(inputs, step), num_programs)
    # Leftover programs run after the others, alone: 64 of them cost 15 us.
    fitting = (stages for stages in (6, 5, 4) if num_tiles * splits <= programs_at_once(stages * stage_bytes))
    num_stages = next(fitting, 3)
    return ProductTile(rows, step, splits, num_warps=4, num_stages=num_stages, dependent_launch=True)


def plain_tile(*, inputs: int, outputs: int) -> ProductTile | None:
    """The tile of a product of a few tokens with a weight (outputs, inputs) in 16 bits.

    None if there are enough tiles without splitting: libraries stream such a weight as fast as memory allows.
    """
    rows, step = 64, 128
    num_tiles = _ceil_div(outputs, rows)
    if num_tiles > PLAIN_PROGRAMS // 2:
        return None
    splits = product_splits(num_tiles, _ceil_div(inputs, step), PLAIN_PROGRAMS)
    return ProductTile(rows, step, splits, num_warps=4, num_stages=3, dependent_launch=True)


def int4_tile(*, inputs: int, outputs: int) -> ProductTile:
    """The tile of a product of a few tokens with a weight (outputs, inputs) in 4 bits."""
    rows, step = 128, 128  # with fewer rows, Triton takes each weight through shared memory
    splits = product_splits(_ceil_div(outputs, rows), _ceil_div(inputs, step), INT4_PROGRAMS)
    return ProductTile(rows, step, splits, num_warps=4, num_stages=4)


def programs_at_once(program_bytes: int) -> int:
    """How many programs with this much shared memory a GPU runs at the same time."""
    return MULTIPROCESSORS * (SHARED_BYTES // (program_bytes + 1024))


def product_splits(num_tiles: int, num_steps: int, num_programs: int) -> int:
    """Shares, none of them empty, that make about `num_programs` of `num_tiles`."""
    wanted = min(num_programs // num_tiles, num_steps // MIN_PRODUCT_STEPS, MAX_PRODUCT_SPLITS)
    return _ceil_div(num_steps, _ceil_div(num_steps, max(wanted, 1)))


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_two(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()
