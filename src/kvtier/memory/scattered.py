"""A run of bytes scattered over this process's memory, such as a caller's tensors. Addresses only."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence


class Scattered:
    """Pieces of equal size, in order. Pieces that are adjacent in memory move together.

    Owns no memory: the caller keeps the pieces alive while this is in use. Copies release the GIL. Thread-safe.
    """

    __slots__ = ("_addresses", "_starts", "nbytes")

    def __init__(self, addresses: Sequence[int], piece_bytes: int) -> None:
        self.nbytes = len(addresses) * piece_bytes
        self._starts: list[int] = []
        self._addresses: list[int] = []
        if addresses and addresses == list(range(addresses[0], addresses[0] + self.nbytes, piece_bytes)):
            self._starts.append(0)  # all in one place, found without a Python loop
            self._addresses.append(addresses[0])
            return
        expected = -1
        start = 0
        for address in addresses:
            if address != expected:
                self._starts.append(start)
                self._addresses.append(address)
            expected = address + piece_bytes
            start += piece_bytes

    def copy_to(self, address: int, start: int, end: int) -> None:
        """Copy bytes `start` to `end` to `address`."""
        for own, offset, nbytes in self._runs(start, end):
            ctypes.memmove(address + offset, own, nbytes)

    def copy_from(self, address: int, start: int, end: int) -> None:
        """Fill bytes `start` to `end` from `address`."""
        for own, offset, nbytes in self._runs(start, end):
            ctypes.memmove(own, address + offset, nbytes)

    def views(self, start: int, end: int) -> list[memoryview]:
        """Bytes `start` to `end` in place, in as few views as the addresses allow."""
        return [_view(own, nbytes) for own, _, nbytes in self._runs(start, end)]

    def has_aligned(self, start: int, end: int, unit: int, max_runs: int) -> bool:
        """Whether bytes `start` to `end` are in at most `max_runs` places, each of whole, aligned units of `unit`."""
        for number, (own, _, nbytes) in enumerate(self._runs(start, end)):
            if own % unit or nbytes % unit or number == max_runs:
                return False
        return True

    def _runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Address, offset from `start` and size of the contiguous parts between `start` and `end`."""
        run = bisect_right(self._starts, start) - 1
        at = start
        while at < end:
            next_start = self._starts[run + 1] if run + 1 < len(self._starts) else self.nbytes
            nbytes = min(next_start, end) - at
            yield self._addresses[run] + at - self._starts[run], at - start, nbytes
            at += nbytes
            run += 1


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
