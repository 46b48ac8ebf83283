"""A step's inputs and results do not wait behind the blocks of a tier, and are right while many are under way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.kernels.paged_batch import DecodeBuffers, PagedArrays, PagedRow
from kvtier.kernels.pinned_pool import pinned_pool
from kvtier.kernels.upload import Download, LastTokens, upload

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


def test_steps_that_are_handed_over_ahead_keep_their_inputs_apart() -> None:
    """Like graphs: the buffers are filled many times before the device reads the first."""
    dice = np.random.default_rng(0)
    last_tokens = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    buffers = DecodeBuffers(max_rows=16, max_blocks=700, block_tokens=16, last_tokens=last_tokens, kv_heads=4)
    slots = dice.permutation(64)[:10]
    (on_device,) = upload([slots], DEVICE)
    buffers.fill(np.zeros(0, np.int64), PagedArrays.lay_out([], block_tokens=16, num_padding_rows=16))
    Download([buffers.tokens(16)]).wait()
    torch.cuda._sleep(100_000_000)

    seen = []
    for number in range(100):
        block_ids = dice.integers(1 << 30, size=(10, 650)).astype(np.int32)
        arrays = PagedArrays.lay_out(
            [PagedRow(ids, 1, 10_000 + number) for ids in block_ids], block_tokens=16, num_padding_rows=6
        )
        buffers.fill(~slots, arrays)
        batch = buffers.batch(16)
        read = [buffers.tokens(16), batch.slots, batch.positions, batch.kv_lengths, batch.query_starts]
        seen.append((arrays, Download([*read, batch.block_tables[:, : arrays.block_tables.shape[1]]])))
        Download([buffers.tokens(10) + 1], LastTokens(last_tokens, on_device)).close()

    for number, (arrays, download) in enumerate(seen):
        tokens, *found = (one.numpy() for one in download.wait())
        assert tokens.tolist() == [number] * 10 + [0] * 6, "each step feeds the next"
        names = ("slots", "positions", "kv_lengths", "query_starts", "block_tables")
        for name, numbers in zip(names, found, strict=True):
            np.testing.assert_array_equal(numbers, getattr(arrays, name), err_msg=name)
