"""What a tier is: a place that may hold blocks and gives them back under a lease. Kept small: each kind is one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease, Reservation


class Tier(Protocol):
    """One level of cache for one namespace. Thread-safe.

    A miss is an answer, not an error. Where a call raises `TierError` or `CapacityError`, the tier is as it was before.
    """

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> KvLayout: ...

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """Lease the longest cached prefix of `hashes`. What is leased is never evicted."""
        ...

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        """Take blocks in, as room and admission allow; returns how many were written.

        The caller's buffers are free when it returns. Raises `TierFull` when there was room for none.
        """
        ...

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]: ...

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Forget `hashes`, or everything; returns how many copies went. Leases keep their bytes until released."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class LazyTier(Tier, Protocol):
    """A tier that can say what it has on disk without reading it."""

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        """As `match`, of what is in memory; the lease's `num_stored` counts what could be read."""
        ...


class SlotTier(Tier, Protocol):
    """A tier whose blocks lie in memory of this host, where a device can write them itself."""

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots for the absent ones of `hashes`; others wait for what is reserved. Raises as `offer` does."""
        ...
