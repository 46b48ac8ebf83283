"""Uploads of many small host arrays to the device, and a step's few results back, beside other copies."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels import reference
from kvtier.kernels.pinned_pool import PinnedSlot, pinned_pool

_ALIGN_BYTES = 16


class HostCopy(Protocol):
    """See `host_copy`."""

    def copy_words(self, source: torch.Tensor, target: torch.Tensor) -> None: ...

    def place_words(
        self,
        source: torch.Tensor,
        num_tokens: int,
        target: torch.Tensor,
        table: torch.Tensor,
        last_tokens: torch.Tensor,
    ) -> None: ...

    def hand_out(
        self, tokens: torch.Tensor, slots: torch.Tensor, last_tokens: torch.Tensor, target: torch.Tensor
    ) -> None: ...


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, of one dimension or more, as tensors on `device`, in order, with their shapes and dtypes.

    On a GPU they are parts of one buffer that a kernel fills from pinned memory: nothing waits, and it is ordered
    before whatever the current stream runs next. On the CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    buffer = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=device)
    with _pinned(arrays, device) as words:
        _host_copy().copy_words(words, buffer.view(torch.int32))
    return unpack(buffer, arrays)


def upload_into(
    arrays: Sequence[npt.NDArray[np.generic]],
    table: npt.NDArray[np.int32],
    *,
    target: torch.Tensor,
    table_target: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """The arrays into `target`, as `unpack` finds them there, and `table` into the first corner of `table_target`.

    The first array are token ids; a negative one, `~s`, arrives as `last_tokens[s]`. Like `upload`, on a GPU it is one
    kernel that nothing waits for: what it overwrites may still be read by what was launched before.
    """
    packed = [*arrays, table]
    corner = table_target[: table.shape[0], : table.shape[1]]
    target = target[: packed_bytes(arrays)].view(torch.int32)
    num_tokens = len(arrays[0])
    assert target.numel() * 4 == packed_bytes(arrays), "there is no room for the arrays"
    assert corner.shape == table.shape, "there is no room for the table"
    if target.device.type == "cpu":
        staging = np.empty(packed_bytes(packed), np.uint8)
        pack(packed, staging)
        reference.place_words(torch.from_numpy(staging).view(torch.int32), num_tokens, target, corner, last_tokens)
        return
    with _pinned(packed, target.device) as words:
        _host_copy().place_words(words, num_tokens, target, corner, last_tokens)


class LastTokens(NamedTuple):
    """Where the tokens of a step are stored for the next ones: token r in `tokens[slots[r]]`. Both are int64."""

    tokens: torch.Tensor
    slots: torch.Tensor


class Download:
    """Tensors on their way to the host. On the CPU they have arrived already."""

    def __init__(self, tensors: Sequence[torch.Tensor], kept: LastTokens | None = None) -> None:
        """Never waits. The tensors, of four or eight bytes a number, may be overwritten by later work.

        The first one, if it is to be kept, is so by the kernel that brings it to the host.
        """
        self._tensors = [tensor.contiguous() for tensor in tensors]
        self._device = self._tensors[0].device
        self._slot: PinnedSlot | None = None
        if self._device.type == "cpu":
            if kept is not None:
                kept.tokens[kept.slots] = self._tensors[0]
            return
        self._slot = pinned_pool(self._device).take(packed_bytes(self._tensors))
        start = 0
        for number, tensor in enumerate(self._tensors):
            words = tensor.view(-1).view(torch.int32) if tensor.numel() else tensor.new_empty(0, dtype=torch.int32)
            target = self._slot.words[start : start + words.numel()]
            if number == 0 and kept is not None:
                _host_copy().hand_out(tensor, kept.slots, kept.tokens, target.view(torch.int64))
            else:
                _host_copy().copy_words(words, target)
            start += _room_bytes(tensor) // 4
        self._slot.event.record()

    @property
    def is_done(self) -> bool:
        """Whether they are on the host."""
        return self._slot is None or self._slot.event.query()

    def wait(self) -> list[torch.Tensor]:
        """The tensors, on the host. Call it once."""
        if self._slot is None:
            return self._tensors
        if not self._slot.event.query():  # `query` keeps the GIL
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
        """Drop them: they are no longer wanted."""
        if self._slot is not None:
            pinned_pool(self._device).give_back(self._slot)
            self._slot = None


def pack(arrays: Sequence[npt.NDArray[np.generic]], staging: npt.NDArray[np.uint8]) -> None:
    """Put the arrays' bytes one after another, each at an offset where any dtype may begin."""
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


def packed_bytes(arrays: Sequence[npt.NDArray[np.generic] | torch.Tensor]) -> int:
    """How many bytes `pack` needs for them."""
    return sum(map(_room_bytes, arrays))


@contextlib.contextmanager
def _pinned(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Iterator[torch.Tensor]:
    """The arrays, packed, as words of pinned memory, for kernels that are launched within."""
    nbytes = packed_bytes(arrays)
    pool = pinned_pool(device)
    slot = pool.take(nbytes)
    pack(arrays, slot.data)
    yield slot.words[: nbytes // 4]
    slot.event.record()
    pool.give_back(slot)


@functools.cache
def _host_copy() -> HostCopy:
    return cast(HostCopy, importlib.import_module("kvtier.kernels.host_copy"))


def _room_bytes(one: npt.NDArray[np.generic] | torch.Tensor) -> int:
    return -(-int(one.nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES
