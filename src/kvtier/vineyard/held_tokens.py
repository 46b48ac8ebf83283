"""The tokens that one query found, kept in place until nothing refers to them.

Tensors and arrays refer to the hold, the hold to the leases and the mapping. So memory that a caller can still reach
through one of our objects is neither evicted nor unmapped. Any thread.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvtier.errors import LeaseError
from kvtier.memory.lease import Lease
from kvtier.vineyard.kv_tensor import KVTensor, point_tensors


class HeldTokens:
    """Memory of a cache that tensors point at (a `Hold`). `mapping` is whatever keeps that memory mapped.

    When the last tensor is gone, the leases are put into `forgotten`, for the cache to release in its next call: the
    garbage collector must not wait for a server.
    """

    __slots__ = ("__weakref__", "_forgotten", "_leases", "_mapping", "_pid", "_windows", "is_over")

    def __init__(self, leases: Sequence[Lease], mapping: object, forgotten: deque[Lease]) -> None:
        self._leases = leases
        self._mapping = mapping
        self._forgotten = forgotten
        self._pid = os.getpid()
        self._windows: list[None] = []
        self.is_over = False

    def enter(self) -> bool:
        self._windows.append(None)  # first: the thread that ends the hold marks it over before it checks the windows
        if self.is_over:
            self._windows.pop()
            return False
        return True

    def leave(self) -> None:
        self._windows.pop()

    def end(self) -> None:
        """Release the memory; a second call does nothing. Raises `LeaseError`, and keeps it, while it is being read.

        In a forked child the hold also ends, but the memory is the parent's to release.
        """
        if self.is_over:
            return
        self.is_over = True
        if self._windows:
            self.is_over = False
            raise LeaseError("arrays or views of this cache's tensors are in use: drop those first")
        if os.getpid() != self._pid:
            self._forgotten.extend(self._leases)
            return
        self._mapping = None
        for lease in self._leases:
            lease.release()

    def __del__(self) -> None:
        if not self.is_over:
            self._forgotten.extend(self._leases)


class FoundTokens:
    """The hits of a query, without an object for each tensor. Ends with `release`, `with`, or its last reference.

    The K of token `t` and layer `l` is at `addresses[t] + offsets[2 * l]`, its V at
    `addresses[t] + offsets[2 * l + 1]`; each has `tensor_bytes`. The addresses are valid as long as this object lives
    and is not released.
    """

    def __init__(
        self, addresses: Sequence[int], offsets: tuple[int, ...], tensor_bytes: int, hold: HeldTokens | None
    ) -> None:
        self._addresses = array("Q", addresses)
        self._hold = hold
        self.offsets = offsets
        self.tensor_bytes = tensor_bytes

    @property
    def num_tokens(self) -> int:
        return len(self._addresses)

    @property
    def addresses(self) -> array[int]:
        """Raises `LeaseError` once it is released."""
        self._check()
        return self._addresses

    def tensors(self, token: int) -> list[tuple[KVTensor, KVTensor]]:
        """The K and V of one token, layer by layer. They keep their memory, like a query's tensors.

        Raises `IndexError` for a token that was not found.
        """
        self._check()
        address = self._addresses[token]
        assert self._hold is not None
        made = [(KVTensor(0, 0), KVTensor(0, 0)) for _ in self.offsets[::2]]
        point_tensors([made], [address], self.offsets, self.tensor_bytes, self._hold)
        return made

    def release(self) -> None:
        """Give the memory back; a second call does nothing. Raises `LeaseError` while arrays over it are in use."""
        if self._hold is not None:
            self._hold.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except LeaseError:
            if error is None:
                raise

    def _check(self) -> None:
        if self._hold is not None and self._hold.is_over:
            raise LeaseError("these tokens have been released")
