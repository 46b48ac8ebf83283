"""Makes the C library's heap give large buffers back."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def give_back_large_buffers() -> None:
    """Buffers of a MiB or more go back to the system when they are freed, for the rest of this process.

    glibc assumes that a freed buffer's size is usual, and keeps as much as twice that for each thread: after a few
    clients that sent the largest frames, hundreds of MiB. Elsewhere nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
