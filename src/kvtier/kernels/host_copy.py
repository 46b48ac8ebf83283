"""Copies a few kilobytes between the device and pinned host memory by a kernel, which reads and writes it itself.

The device's copy engines take one copy after another, even from different streams: behind a tier's blocks, a copy
of a few numbers would wait for milliseconds, and the step that needs them with it. A kernel waits for its own stream
alone.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 2048
_TOKENS = 128
_WARPS = 8
_QUAD = 4
"""Words per read."""


def copy_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy dense int32 words, as many as `source` has. Either side may be pinned memory of the host.

    It is ordered in the current stream, and nothing here waits. The host sees what was written once an event that was
    recorded behind it is over; until then it must leave both sides alone.
    """
    num_words = source.numel()
    assert source.dtype == target.dtype == torch.int32, "words are int32"
    assert source.is_contiguous(), "words must be dense"
    assert target.is_contiguous(), "words must be dense"
    assert num_words <= target.numel(), "there is no room for so many words"
    if num_words:
        _copy_kernel[(triton.cdiv(num_words, _WORDS),)](
            source, target, num_words // _QUAD, num_words, WORDS=_WORDS, QUAD=_QUAD, num_warps=_WARPS
        )


def place_words(
    source: torch.Tensor, num_tokens: int, target: torch.Tensor, table: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """Like `reference.place_words`; `source` may be pinned memory, under the same rule as for `copy_words`.

    The tokens, what is left of `target`, and the table begin at multiples of 16 bytes in `source`, as `upload.pack` has
    it, and it is as long as a multiple of that.
    """
    num_rows, num_columns = table.shape
    token_words = triton.cdiv(2 * num_tokens, _QUAD) * _QUAD
    num_words = target.numel() - token_words
    assert source.dtype == target.dtype == table.dtype == torch.int32, "words are int32"
    assert source.is_contiguous() and target.is_contiguous() and table.stride(1) == 1, "rows must be dense"  # noqa: PT018
    assert num_words >= 0 and num_words % _QUAD == 0, "parts begin at multiples of 16 bytes"  # noqa: PT018
    assert target.numel() + table.numel() <= source.numel() and source.numel() % _QUAD == 0, "parts are missing"  # noqa: PT018
    assert last_tokens.dtype == torch.int64 and last_tokens.is_contiguous(), "tokens are dense and int64"  # noqa: PT018
    _place_kernel[(triton.cdiv(source.numel(), _WORDS),)](
        source[: 2 * num_tokens].view(torch.int64),
        source[token_words:],
        last_tokens,
        target[: 2 * num_tokens].view(torch.int64),
        target[token_words:],
        table,
        num_tokens,
        num_words // _QUAD,
        num_rows * num_columns,
        num_columns,
        table.stride(0),
        WORDS=_WORDS,
        QUAD=_QUAD,
        num_warps=_WARPS,
    )


def hand_out(tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, target: torch.Tensor) -> None:
    """Put token r into `last_tokens[slots[r]]` and into `target[r]`, which may be pinned memory as for `copy_words`.

    All are dense and int64. No slot occurs twice.
    """
    num_tokens = tokens.numel()
    for one in (tokens, slots, last_tokens, target):
        assert one.dtype == torch.int64 and one.is_contiguous(), "tokens are dense and int64"  # noqa: PT018
    assert num_tokens == slots.numel() <= target.numel(), "each token has a slot and a place"
    if num_tokens:
        _hand_out_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
            tokens, slots, last_tokens, target, num_tokens, TOKENS=_TOKENS
        )


@triton.jit(do_not_specialize=["num_quads", "num_words"])
def _copy_kernel(source_ptr, target_ptr, num_quads, num_words, WORDS: tl.constexpr, QUAD: tl.constexpr):
    places = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    # Whole quads are read at once: this memory is not cached, so the next word would be read again.
    is_there = places < num_quads * QUAD
    # The host writes this memory between two launches: caches must not be used.
    words = tl.load(source_ptr + places, mask=is_there, cache_modifier=".cv")
    tl.store(target_ptr + places, words, mask=is_there)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        last_places = num_quads * QUAD + tl.arange(0, QUAD)
        is_last = last_places < num_words
        last_words = tl.load(source_ptr + last_places, mask=is_last, cache_modifier=".cv")
        tl.store(target_ptr + last_places, last_words, mask=is_last)


@triton.jit(do_not_specialize=["num_tokens", "num_quads", "num_cells", "num_columns", "row_stride"])
def _place_kernel(
    tokens_ptr,
    words_ptr,
    last_tokens_ptr,
    placed_tokens_ptr,
    placed_words_ptr,
    table_ptr,
    num_tokens,
    num_quads,
    num_cells,
    num_columns,
    row_stride,
    WORDS: tl.constexpr,
    QUAD: tl.constexpr,
):
    """Copies words, then the cells of the table; the first programs also copy the tokens."""
    places = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    num_words = num_quads * QUAD
    is_there = places < num_words + tl.cdiv(num_cells, QUAD) * QUAD
    is_token = places < num_tokens
    # All reads are issued before any is waited for. See `_copy_kernel`.
    words = tl.load(words_ptr + places, mask=is_there, cache_modifier=".cv")
    tokens = tl.load(tokens_ptr + places, mask=is_token, other=0, cache_modifier=".cv")
    tl.store(placed_words_ptr + places, words, mask=places < num_words)
    cells = places - num_words
    cell_ptrs = table_ptr + cells // num_columns * row_stride + cells % num_columns
    tl.store(cell_ptrs, words, mask=(cells >= 0) & (cells < num_cells))
    last_tokens = tl.load(last_tokens_ptr + ~tokens, mask=tokens < 0, other=0)
    tl.store(placed_tokens_ptr + places, tl.where(tokens < 0, last_tokens, tokens), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def _hand_out_kernel(tokens_ptr, slots_ptr, last_tokens_ptr, target_ptr, num_tokens, TOKENS: tl.constexpr):
    places = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_there = places < num_tokens
    tokens = tl.load(tokens_ptr + places, mask=is_there)
    slots = tl.load(slots_ptr + places, mask=is_there)
    tl.store(target_ptr + places, tokens, mask=is_there)
    tl.store(last_tokens_ptr + slots, tokens, mask=is_there)
