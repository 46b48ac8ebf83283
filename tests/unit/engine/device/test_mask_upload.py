"""Masks arrive as they were written, step after step, while earlier ones are still being read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier.engine.device.mask_upload import MaskUpload
from tests.support.batches import DEVICE


@pytest.mark.parametrize(("num_rows", "num_words"), [(1, 1), (3, 8), (32, 4752)])
def test_masks_arrive_with_their_rows(num_rows: int, num_words: int) -> None:
    upload = MaskUpload(DEVICE)
    masks = upload.make(num_rows, num_words)
    masks.rows[:] = np.arange(num_rows)[::-1]
    masks.words[:] = np.arange(num_rows * num_words, dtype=np.int32).reshape(num_rows, num_words)

    allowed = upload.upload(masks)

    assert {allowed.rows.device.type, allowed.words.device.type} == {DEVICE.type}
    assert allowed.rows.tolist() == list(range(num_rows))[::-1]
    assert torch.equal(allowed.words.cpu().reshape(-1), torch.arange(num_rows * num_words, dtype=torch.int32))


def test_the_masks_of_every_step_are_its_own() -> None:
    """The memory is used again, and grows: a step's readers still find their own masks there."""
    upload = MaskUpload(DEVICE)
    found = []

    for number in range(40):
        masks = upload.make(1 + number % 5, 64 * (1 + number // 10))
        masks.rows[:] = number
        masks.words[:] = -number
        allowed = upload.upload(masks)
        found.append((allowed.rows.clone(), allowed.words.clone()))
        upload.done()

    for number, (rows, words) in enumerate(found):
        assert set(rows.tolist()) == {number}
        assert set(words.flatten().tolist()) == {-number}


def test_masks_that_were_never_uploaded_are_dropped() -> None:
    """A step may fail after its memory was made."""
    upload = MaskUpload(DEVICE)
    upload.make(4, 16)

    masks = upload.make(2, 16)
    masks.rows[:] = 1
    masks.words[:] = 5

    assert set(upload.upload(masks).words.flatten().tolist()) == {5}
