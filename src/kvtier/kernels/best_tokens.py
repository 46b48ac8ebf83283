"""The likeliest token of each row of logits, in one kernel, from the dtype in which the model's head leaves them."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 8192
_WARPS = 16
_STAGES = 4


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """As `reference.best_tokens`, but that NaN counts as infinity, of which the first wins; there it counts as more."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous(), "rows must be dense"
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _best_kernel[(num_rows,)](
            logits, token_ids, VOCAB=vocab_size, COLUMNS=_COLUMNS, STAGES=_STAGES, num_warps=_WARPS
        )
    return token_ids


@triton.jit
def _best_kernel(logits_ptr, token_ids_ptr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """One row. Each column of a piece keeps its own best; they are compared at the end."""
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    token_ids = columns
    for start in tl.range(0, VOCAB, COLUMNS, num_stages=STAGES):
        is_there = start + columns < VOCAB
        logits = tl.load(row_ptr + start + columns, mask=is_there, other=float("-inf")).to(tl.float32)
        logits = tl.where(logits == logits, logits, float("inf"))
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        token_ids = tl.where(is_better, start + columns, token_ids)
    is_best = best == tl.max(best, 0)
    tl.store(token_ids_ptr + row, tl.min(tl.where(is_best, token_ids, VOCAB), 0).to(tl.int64))
