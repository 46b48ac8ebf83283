"""Forbidden tokens are those of plain torch. `test_triton.py` runs this file too."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels import reference
from kvtier.kernels.token_mask import forbid
from tests.support.batches import DEVICE

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 31), (2, 32), (4, 4097), (3, 10_000)])
def test_forbidden_tokens_become_minus_infinity_and_others_stay(
    dtype: torch.dtype, num_rows: int, vocab_size: int
) -> None:
    logits = torch.randn(num_rows, vocab_size).to(dtype)
    rows = torch.randperm(num_rows)[: -(-num_rows // 2)]
    words = torch.randint(-(1 << 31), 1 << 31, (len(rows), -(-vocab_size // 32) + 1), dtype=torch.int32)
    expected = logits.clone()
    reference.forbid(expected, rows, words)

    found = logits.clone().to(DEVICE)
    forbid(found, rows.to(DEVICE), words.to(DEVICE))

    assert torch.equal(found.cpu(), expected)
    for place, row in enumerate(rows.tolist()):
        allowed = [token for token in range(vocab_size) if int(words[place, token // 32]) >> (token % 32) & 1]
        assert torch.isfinite(expected[row].float()).nonzero().view(-1).tolist() == allowed
    others = sorted(set(range(num_rows)) - set(rows.tolist()))
    assert torch.equal(expected[others], logits[others])


def test_no_rows_change_nothing() -> None:
    logits = torch.randn(2, 40, device=DEVICE)
    before = logits.clone()

    forbid(
        logits, torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    )

    assert torch.equal(logits, before)
