"""Forbids tokens by a grammar in rows of logits, in the dtype in which the model's head leaves them."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 4096
_WARPS = 4


def forbid(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Like `reference.forbid`. Forbidden logits are written; none are read."""
    vocab_size, (num_rows, num_words) = logits.shape[-1], words.shape
    assert logits.is_contiguous() and rows.is_contiguous() and words.is_contiguous(), "rows must be dense"  # noqa: PT018
    assert rows.dtype == torch.int64 and words.dtype == torch.int32, "rows are int64, words int32"  # noqa: PT018
    assert num_words * 32 >= vocab_size, "each token has a bit"
    if num_rows:
        _forbid_kernel[(num_rows, triton.cdiv(vocab_size, _COLUMNS))](
            logits, rows, words, num_words, VOCAB=vocab_size, COLUMNS=_COLUMNS, num_warps=_WARPS
        )


@triton.jit(do_not_specialize=["num_words"])
def _forbid_kernel(logits_ptr, rows_ptr, words_ptr, num_words, VOCAB: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one row."""
    place, piece = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    columns = piece * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < VOCAB
    words = tl.load(words_ptr + place.to(tl.int64) * num_words + columns // 32, mask=is_there, other=-1)
    is_forbidden = ((words >> (columns % 32)) & 1) == 0
    never = tl.full((COLUMNS,), float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * VOCAB + columns, never, mask=is_there & is_forbidden)
