"""Arrays arrive with their shapes, dtypes and contents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.upload import Download, LastTokens, pack, unpack, upload
from tests.support.batches import DEVICE

ARRAYS: list[npt.NDArray[np.generic]] = [
    np.arange(3, dtype=np.int64),
    np.array([[1, -2], [3, 4], [5, 6]], np.int32),
    np.array([0.5], np.float32),
    np.empty((0, 4), np.int32),
    np.array([True, False]),
    np.arange(6, dtype=np.float64).reshape(2, 3).T,
]


def assert_arrived(tensors: list[torch.Tensor]) -> None:
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert tensor.cpu().numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_arrays_arrive_in_order_on_the_device() -> None:
    tensors = upload(ARRAYS, DEVICE)

    assert {tensor.device.type for tensor in tensors} == {DEVICE.type}
    assert_arrived(tensors)


def test_what_is_packed_into_one_buffer_is_unpacked_from_it() -> None:
    staging = torch.full((256,), 0xFF, dtype=torch.uint8)

    pack(ARRAYS, staging.numpy())

    assert_arrived(unpack(staging, ARRAYS))


def test_parts_are_views_of_the_buffer() -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)

    first = unpack(buffer, ARRAYS)[0]
    first[0] = 1

    assert buffer[0] == 1


def test_results_come_back_with_their_shapes_and_dtypes() -> None:
    tensors = [
        torch.tensor([5, -(2**40), 7], device=DEVICE),
        torch.tensor([0.25], device=DEVICE),
        torch.empty((0, 3), dtype=torch.int64, device=DEVICE),
        torch.arange(6, dtype=torch.float32, device=DEVICE).view(2, 3).T,
    ]

    download = Download(tensors)
    if DEVICE.type == "cpu":
        assert download.is_done
    found = download.wait()
    assert download.is_done

    for one, tensor in zip(found, tensors, strict=True):
        assert one.device.type == "cpu"
        assert one.dtype == tensor.dtype
        assert torch.equal(one, tensor.cpu())


def test_tokens_come_back_and_are_kept_in_their_slots() -> None:
    tokens, logprobs = torch.tensor([11, 12, 13], device=DEVICE), torch.tensor([0.5, 0.25, 1.0], device=DEVICE)
    last_tokens = torch.arange(6, device=DEVICE)

    found = Download([tokens, logprobs], LastTokens(last_tokens, torch.tensor([4, 0, 2], device=DEVICE))).wait()

    assert [one.tolist() for one in found] == [[11, 12, 13], [0.5, 0.25, 1.0]]
    assert last_tokens.tolist() == [12, 1, 13, 3, 11, 5]
