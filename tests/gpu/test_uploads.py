"""A step's inputs and results do not wait behind the blocks of a tier, and are right while many are under way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.kernels.pinned_pool import pinned_pool
from kvtier.kernels.upload import Download, upload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
BIG_BYTES = 1 << 30


def busy_bus(*, to_device: bool) -> Callable[[], bool]:
    """Copies of some tens of milliseconds under way beside the current stream; whether they still are."""
    host = torch.empty(BIG_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(BIG_BYTES, dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    over = torch.cuda.Event()
    with torch.cuda.stream(stream):
        for _ in range(4):
            (device if to_device else host).copy_(host if to_device else device, non_blocking=True)
        over.record()
    return lambda: not over.query()


def test_an_upload_does_not_wait_for_blocks_on_their_way_in() -> None:
    numbers = np.arange(1000, dtype=np.int64)
    Download(upload([numbers], DEVICE)).wait()  # kernels that are loaded wait for the device
    is_busy = busy_bus(to_device=True)

    (found,) = Download(upload([numbers], DEVICE)).wait()

    assert is_busy(), "the copies were over before the numbers were there"
    assert found.tolist() == numbers.tolist()
    torch.cuda.synchronize()


def test_a_result_does_not_wait_for_blocks_on_their_way_out() -> None:
    numbers = torch.arange(1000, device=DEVICE)
    Download([numbers]).wait()
    is_busy = busy_bus(to_device=False)

    (found,) = Download([numbers]).wait()

    assert is_busy(), "the copies were over before the numbers were there"
    assert found.tolist() == list(range(1000))
    torch.cuda.synchronize()


def test_many_uploads_under_way_keep_their_numbers() -> None:
    dice = np.random.default_rng(0)
    arrays = [dice.integers(2**40, size=dice.integers(1, 5000)) for _ in range(200)]
    torch.cuda._sleep(100_000_000)

    downloads = [Download(upload([array], DEVICE)) for array in arrays]

    for array, download in zip(arrays, downloads, strict=True):
        assert download.wait()[0].tolist() == array.tolist()
    num_slots = pinned_pool(DEVICE).num_slots
    for array in arrays:
        Download(upload([array], DEVICE)).wait()
    assert pinned_pool(DEVICE).num_slots == num_slots
