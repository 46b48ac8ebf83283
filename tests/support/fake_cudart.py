"""A CUDA runtime that is the host: it copies at once, and remembers what was registered."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from tests.support.waiting import LIMIT_S

TO_DEVICE = 1


class _Function:
    """A function as in ctypes: a call, with attributes that may be set."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *arguments: Any) -> Any:
        return self._act(*arguments)


class FakeLibrary:
    """`libcudart` for `Cudart`. Statuses to answer with are set by name; `calls` lists what was asked for.

    `modes` has, for each call that CUDA does not like beside a capture, its name, its thread and the thread's mode.
    """

    def __init__(self, version: int = 13000, *, has_batch: bool = True) -> None:
        self.statuses: dict[str, int] = {}
        self.calls: list[str] = []
        self.batches: list[int] = []
        self.source_orders: list[int] = []
        self.registered: dict[int, int] = {}
        self.may_register = threading.Event()
        self.may_register.set()
        self.max_registered_pieces: int | None = None
        self.last_error = 0
        self.modes: list[tuple[str, int, int]] = []
        self._mode = threading.local()
        self._version = version
        names = ["SetDevice", "GetLastError", "GetErrorString", "RuntimeGetVersion", "ThreadExchangeStreamCaptureMode"]
        names += ["HostRegister", "HostUnregister", "MemcpyAsync", "Memcpy2DAsync"]
        if has_batch:
            names.append("MemcpyBatchAsync")
        for name in names:
            setattr(self, f"cuda{name}", _Function(self._counted(f"cuda{name}", getattr(self, f"_{name}"))))

    def _counted(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in ("cudaHostRegister", "cudaHostUnregister"):
                self.modes.append((name, threading.get_ident(), self.capture_mode))
            status = self.statuses.get(name, 0)
            if status:
                self.last_error = status
                return status
            return act(*arguments)

        return call

    @property
    def capture_mode(self) -> int:
        """The calling thread's: 0 is global, 2 is relaxed."""
        return getattr(self._mode, "value", 0)

    def _ThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode[0], self._mode.value = self.capture_mode, mode[0]
        return 0

    def _SetDevice(self, device: int) -> int:
        return 0

    def _GetLastError(self) -> int:
        status, self.last_error = self.last_error, 0
        return status

    def _GetErrorString(self, status: int) -> bytes:
        return b"out of luck"

    def _RuntimeGetVersion(self, version: Any) -> int:
        version[0] = self._version
        return 0

    def _HostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.may_register.wait(LIMIT_S)
        if len(self.registered) == self.max_registered_pieces:
            return 2
        self.registered[address] = nbytes
        return 0

    def _HostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def _MemcpyAsync(self, destination: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        ctypes.memmove(destination, source, nbytes)
        return 0

    def _Memcpy2DAsync(
        self,
        destination: int,
        destination_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> int:
        assert width <= min(destination_pitch, source_pitch)
        for row in range(height):
            ctypes.memmove(destination + row * destination_pitch, source + row * source_pitch, width)
        return 0

    def _MemcpyBatchAsync(
        self,
        destinations: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        indexes: int,
        num_attributes: int,
        *tail: int,
    ) -> int:
        assert len(tail) == (1 if self._version >= 13000 else 2)
        assert (num_attributes, _words(indexes, 1)) == (1, [0])
        self.batches.append(count)
        self.source_orders.append(ctypes.c_int.from_address(attributes).value)
        for entry in zip(_words(destinations, count), _words(sources, count), _words(sizes, count), strict=True):
            ctypes.memmove(*entry)
        return 0


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))
