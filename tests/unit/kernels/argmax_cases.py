"""The likeliest tokens are those of plain torch, ties included. `test_triton.py` runs this file too."""

from __future__ import annotations

import pytest
import torch

from kvtier.kernels import reference
from kvtier.kernels.argmax import argmax_tokens
from tests.support.batches import DEVICE

pytestmark = pytest.mark.sampled

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 7), (2, 8192), (5, 8193), (3, 20_000)])
def test_each_row_gets_its_likeliest_token(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = torch.randn(num_rows, vocab_size).to(dtype).to(DEVICE)  # in 16 bits many are equal

    found = argmax_tokens(logits)

    assert found.dtype == torch.int64
    assert torch.equal(found.cpu(), reference.argmax_tokens(logits.float().cpu()))


@pytest.mark.parametrize("places", [(4, 9), (9000, 3), (8191, 8192), (19_999, 5, 8197), (808, 9000), (9000, 17_000)])
def test_of_equal_logits_the_first_is_taken(places: tuple[int, ...]) -> None:
    logits = torch.zeros(1, 20_000, device=DEVICE)
    logits[0, list(places)] = 1.0

    assert argmax_tokens(logits).tolist() == [min(places)]


def test_rows_of_one_value_begin_at_the_first_token() -> None:
    logits = torch.tensor([-INF, 0.0, -0.0, INF, float("nan")], device=DEVICE)[:, None].repeat(1, 9000)

    assert argmax_tokens(logits).tolist() == [0] * 5


def test_signs_of_zero_do_not_count_and_nan_does() -> None:
    rows = torch.tensor([[-1.0, -0.0, 0.0], [-2.0, 5.0, float("nan")], [-INF, -1e30, -INF]], device=DEVICE)

    assert argmax_tokens(rows).tolist() == rows.cpu().argmax(-1).tolist() == [1, 2, 1]


def test_no_rows_have_no_tokens() -> None:
    assert argmax_tokens(torch.zeros(0, 10, device=DEVICE)).tolist() == []
