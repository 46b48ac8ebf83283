"""Makes the C library's heap give large buffers back."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def give_back_large_buffers() -> None:
    """Return freed buffers of a MiB or more to the system, for the rest of this process.

    glibc assumes that the size of a freed buffer is typical, and keeps up to twice that for each thread: hundreds of
    MiB after a few clients have sent the largest frames. With another C library, this does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
