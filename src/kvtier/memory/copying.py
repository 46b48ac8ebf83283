"""Copies between arenas and a caller's buffers, without the GIL and in as few moves as the addresses allow.

One long move is up to twice as fast as many of a block's size (beyond some megabytes the C library stores past
the cache), so neighbouring blocks are moved together where both sides are adjacent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvtier.errors import ConfigError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Buffers of callers: anything with C-contiguous bytes (arrays of numpy and torch's numpy views, too)."""

_MAX_MOVE_BYTES = 256 << 20


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


def byte_views(buffers: Iterable[Buffer], nbytes: int, *, writable: bool) -> list[memoryview]:
    """Flat views of `buffers`. Raises `ConfigError` for a buffer that does not have exactly `nbytes`."""
    views = []
    for position, buffer in enumerate(buffers):
        try:
            view = memoryview(buffer)
        except TypeError as error:
            raise ConfigError(f"buffer {position} is a {type(buffer).__name__}, which holds no bytes") from error
        if view.nbytes != nbytes:
            raise ConfigError(f"buffer {position} has {view.nbytes} bytes; a block has {nbytes}")
        if writable and view.readonly:
            raise ConfigError(f"buffer {position} is read-only and cannot be filled")
        if not view.c_contiguous:
            raise ConfigError(f"buffer {position} is not C-contiguous")
        views.append(view if view.ndim == 1 and view.format == "B" else view.cast("B"))
    return views


def address_of(view: memoryview) -> int:
    """The address of the view's first byte. Valid while the view is."""
    raw = _PyBuffer()
    _get_buffer(view, raw, 0)
    address = raw.buf or 0
    _release_buffer(raw)
    return address


def copy_blocks(destinations: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
    """Copy `nbytes` from each source address to the destination address beside it. Releases the GIL."""
    count = len(destinations)
    max_blocks = max(1, _MAX_MOVE_BYTES // nbytes)
    start = 0
    while start < count:
        end = start + 1
        while (
            end < count
            and end - start < max_blocks
            and destinations[end] == destinations[end - 1] + nbytes
            and sources[end] == sources[end - 1] + nbytes
        ):
            end += 1
        ctypes.memmove(destinations[start], sources[start], (end - start) * nbytes)
        start = end
