"""Uploads the masks of a step from the memory in which they were made. The runner's thread owns it.

They are uploaded beside the forward pass whose logits they are for, on a stream of their own. Half a megabyte for 32
rows of a large vocabulary would otherwise hold up sampling.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.constraint.constraints import TokenMasks
from kvtier.engine.device.sampler import AllowedTokens
from kvtier.kernels.pinned_pool import pinned_pool

if TYPE_CHECKING:
    from kvtier.kernels.pinned_pool import PinnedSlot

_ALIGN_BYTES = 16


class MaskUpload:
    """For each step, call `make`, `upload`, and `done` once the kernels that read the masks are launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = np.zeros(0, np.uint8)
        self._slot: PinnedSlot | None = None
        self._lane: _Lane | None = None

    def make(self, num_rows: int, num_words: int) -> TokenMasks:
        """Memory for the masks of this step."""
        row_bytes = _row_bytes(num_rows)
        num_bytes = row_bytes + 4 * num_rows * num_words
        host = self._room(-(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        rows = host[: 8 * num_rows].view(np.int64)
        words = host[row_bytes:num_bytes].view(np.int32).reshape(num_rows, num_words)
        return TokenMasks(rows, words)

    def upload(self, masks: TokenMasks) -> AllowedTokens:
        """Upload masks from `make`. Kernels launched on the current stream from now on wait for them."""
        num_rows, num_words = masks.words.shape
        if self._slot is None:
            return AllowedTokens(torch.from_numpy(masks.rows), torch.from_numpy(masks.words))
        slot, self._slot = self._slot, None
        if self._lane is None:
            self._lane = _Lane(self._device)
        start = _row_bytes(num_rows)
        size = start + masks.words.nbytes
        buffer = self._lane.bring(slot, -(-size // _ALIGN_BYTES) * _ALIGN_BYTES)
        rows = buffer[: masks.rows.nbytes].view(torch.int64)
        return AllowedTokens(rows, buffer[start:size].view(torch.int32).view(num_rows, num_words))

    def done(self) -> None:
        """No kernel launched from now on reads this step's masks."""
        if self._lane is not None:
            self._lane.free.record()

    def _room(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if self._device.type == "cuda":
            if self._slot is not None:  # of a step that failed
                pinned_pool(self._device).give_back(self._slot)
            self._slot = pinned_pool(self._device).take(num_bytes)
            return self._slot.data
        if len(self._host) < num_bytes:
            self._host = np.zeros(2 * num_bytes, np.uint8)
        return self._host


class _Lane:
    """A stream beside the current one, and the memory on the device that it writes."""

    def __init__(self, device: torch.device) -> None:
        self.free = torch.cuda.Event()
        """Recorded after the last kernel that reads the memory."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._arrived = torch.cuda.Event()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def bring(self, slot: PinnedSlot, num_bytes: int) -> torch.Tensor:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(2 * num_bytes, dtype=torch.uint8, device=self._device)
            self._buffer.record_stream(self._stream)
            self.free.record()  # behind whatever used this memory before
        words = slot.words[: num_bytes // 4]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self.free)
            importlib.import_module("kvtier.kernels.host_copy").copy_words(words, self._buffer.view(torch.int32))
            self._arrived.record()
            slot.event.record()
        pinned_pool(self._device).give_back(slot)
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return self._buffer


def _row_bytes(num_rows: int) -> int:
    """The room of the rows' numbers, in front of the masks."""
    return -(-8 * num_rows // _ALIGN_BYTES) * _ALIGN_BYTES
