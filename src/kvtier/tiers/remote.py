"""Cache servers as a tier: one on this host through shared memory, or several over TCP. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.client.client import CacheClient, SingleClient
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease, Reservation
from kvtier.memory.mapped import MappedArena


class RemoteTier:
    """Owns `client`, which has deadlines, a breaker and the way back of its own."""

    def __init__(self, client: CacheClient, name: str = "server") -> None:
        self.name = name
        self._client = client

    @property
    def client(self) -> CacheClient:
        return self._client

    @property
    def layout(self) -> KvLayout:
        return self._client.layout

    @property
    def generation(self) -> tuple[int, ...]:
        """How often each server has come back: what was offered before may be gone."""
        return self._client.num_returns

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self._client.match(hashes, timeout_s=timeout_s)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        return self._client.set(hashes, blocks)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self._client.contains(hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        return self._client.drop(hashes)

    def close(self) -> None:
        self._client.close()


class SingleServerTier(RemoteTier):
    """One cache server."""

    def __init__(self, client: SingleClient, name: str = "server") -> None:
        super().__init__(client, name)
        self._single = client

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self._single.match_lazily(hashes, timeout_s=timeout_s)


class SharedMemoryTier(SingleServerTier):
    """The cache server of this host: its slots can be written in place."""

    @property
    def arena(self) -> MappedArena:
        """Its memory. Raises `TierUnavailable` while there is no server."""
        return self._single.arena

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        return self._single.reserve(hashes)
