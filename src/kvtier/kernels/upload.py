"""Many small host arrays to the device, and a step's few results back, beside whatever else is being copied."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.pinned_pool import Slot, pinned_pool

_ALIGN_BYTES = 16


class CopyWords(Protocol):
    """See `host_copy.copy_words`."""

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None: ...


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, of one dimension or more, as tensors on `device`, in order, with their shapes and dtypes.

    On a GPU they are parts of one buffer that a kernel fills from pinned memory: nothing waits, and it is ordered
    before whatever the current stream runs next. On the CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    nbytes = sum(map(_room_bytes, arrays))
    pool = pinned_pool(device)
    slot = pool.take(nbytes)
    pack(arrays, slot.data)
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    _copy_words()(slot.words[: nbytes // 4], buffer.view(torch.int32))
    slot.event.record()
    pool.give_back(slot)
    return unpack(buffer, arrays)


class Download:
    """Tensors on their way to the host. On the CPU they are there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing waits. The tensors, of four or eight bytes a number, may be overwritten by what comes after."""
        self._tensors = [tensor.contiguous() for tensor in tensors]
        self._device = self._tensors[0].device
        self._slot: Slot | None = None
        if self._device.type == "cpu":
            return
        self._slot = pinned_pool(self._device).take(sum(map(_room_bytes, self._tensors)))
        start = 0
        for tensor in self._tensors:
            words = tensor.view(-1).view(torch.int32) if tensor.numel() else tensor.new_empty(0, dtype=torch.int32)
            _copy_words()(words, self._slot.words[start : start + words.numel()])
            start += _room_bytes(tensor) // 4
        self._slot.event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors, on the host. Call it once."""
        if self._slot is None:
            return self._tensors
        self._slot.event.synchronize()
        found = []
        start = 0
        for tensor in self._tensors:
            part = torch.from_numpy(self._slot.data[start : start + tensor.nbytes].copy())
            found.append(part.view(tensor.dtype).view(tensor.shape))
            start += _room_bytes(tensor)
        self.close()
        return found

    def close(self) -> None:
        """Nobody wants them any more."""
        if self._slot is not None:
            pinned_pool(self._device).give_back(self._slot)
            self._slot = None


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


@functools.cache
def _copy_words() -> CopyWords:
    return cast(CopyWords, importlib.import_module("kvtier.kernels.host_copy").copy_words)


def _room_bytes(one: npt.NDArray[np.generic] | torch.Tensor) -> int:
    return -(-int(one.nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES
