"""Pinned host memory that kernels read and write, taken and given back without waiting for the device.

torch's own pool knows of copies that use its memory, not of kernels. Here each slot has an event, recorded behind what
used it last, and is handed out again once that is over. Thread-safe.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

_MIN_SLOT_BYTES = 16 << 10
_CHUNK_BYTES = 32 << 20
"""Pinned memory is allocated in pieces of this size. CUDA may hold such a call, and every call behind it, until the
device is idle, so none should come between steps: one piece is enough for steps of a thousand rows."""


class Event(Protocol):
    """The part of a `torch.cuda.Event` that slots need."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(eq=False, frozen=True, slots=True)
class PinnedSlot:
    """Pinned memory, as a tensor of int32 for kernels and as bytes for the host. `event` is recorded by its user."""

    words: torch.Tensor
    data: npt.NDArray[np.uint8]
    event: Event


class PinnedPool:
    """Slots of one device, of sizes that are powers of two, cut from large pieces. None is returned to the system."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], make_event: Callable[[], Event]) -> None:
        """`allocate` makes an int32 tensor of a number of words in pinned memory."""
        self._allocate = allocate
        self._make_event = make_event
        self._lock = threading.Lock()
        self._given_back: defaultdict[int, deque[PinnedSlot]] = defaultdict(deque)
        self._slots: list[PinnedSlot] = []  # slots never given back stay pinned, too: the device may still write them
        self._unused = allocate(0)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def take(self, nbytes: int) -> PinnedSlot:
        """A slot of at least `nbytes` that neither host nor device uses."""
        size = max(_MIN_SLOT_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else _MIN_SLOT_BYTES
        with self._lock:
            waiting = self._given_back[size]
            if waiting and waiting[0].event.query():
                return waiting.popleft()
            if self._unused.numel() * 4 < size:
                self._unused = self._allocate(max(size, _CHUNK_BYTES) // 4)
            words, self._unused = self._unused[: size // 4], self._unused[size // 4 :]
            slot = PinnedSlot(words, words.numpy().view(np.uint8), self._make_event())
            self._slots.append(slot)
            return slot

    def give_back(self, slot: PinnedSlot) -> None:
        """Give it back once its event is recorded: it is handed out again when the event is over."""
        with self._lock:
            self._given_back[slot.data.nbytes].append(slot)


@functools.cache
def pinned_pool(device: torch.device) -> PinnedPool:
    """The pool of a GPU, for all threads that use it."""
    del device  # events belong to the device whose stream they are recorded in
    return PinnedPool(
        lambda num_words: torch.empty(num_words, dtype=torch.int32, pin_memory=True), lambda: torch.cuda.Event()
    )
