"""Many small host arrays, one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 16


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, of one dimension or more, as tensors on `device`, in order, with their shapes and dtypes.

    On a GPU they are parts of one buffer that one asynchronous copy fills from pinned memory: nothing waits, and the
    copy is ordered before whatever the current stream runs next. On the CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    staging = torch.empty(sum(map(_room_bytes, arrays)), dtype=torch.uint8, pin_memory=True)
    pack(arrays, staging.numpy())
    return unpack(staging.to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[np.generic]], staging: npt.NDArray[np.uint8]) -> None:
    """Put the arrays' bytes one after the other, each where any dtype may begin."""
    start = 0
    for array in arrays:
        staging[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _room_bytes(array)


def unpack(buffer: torch.Tensor, like: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
    """The parts of a buffer that `pack` filled, as views of it."""
    tensors = []
    start = 0
    for array in like:
        part = buffer[start : start + array.nbytes]
        tensors.append(part.view(torch.from_numpy(array[:0]).dtype).view(array.shape))
        start += _room_bytes(array)
    return tensors


def _room_bytes(array: npt.NDArray[np.generic]) -> int:
    return -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
