"""A cache server as a tier: on this host through shared memory, or over TCP. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.retention import Granted
from kvtier.client.client import CacheClient
from kvtier.errors import TierRefused
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease, Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.retention import RetentionAsk
from kvtier.tiers.tier import PlainTier


class RemoteTier(PlainTier):
    """Owns `client`, which has deadlines, a circuit breaker and reconnection of its own.

    On this host, the server's slots can be written in place.
    """

    keeps_notes = True

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
    def is_local(self) -> bool:
        return self._client.is_local

    @property
    def arena(self) -> MappedArena | None:
        return self._client.arena if self._client.is_local else None

    @property
    def generation(self) -> int:
        return self._client.num_returns

    @property
    def most_prompt_blocks(self) -> int | None:
        return self._client.most_prompt_blocks

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        self._client.learn(hashes)

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self._client.match(hashes, timeout_s=timeout_s)

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self._client.match_lazily(hashes, timeout_s=timeout_s)

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        return self._client.reserve(hashes)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        return self._client.set(hashes, blocks)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self._client.contains(hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        return self._client.drop(hashes)

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        """A refusal, for instance by a server of an older release, grants nothing; it is no failure of the tier."""
        try:
            return self._client.retain(
                hashes,
                ask.ttl_s,
                priority=ask.priority,
                account=ask.account,
                account_bytes=ask.account_bytes,
            )
        except TierRefused as error:
            return Granted(0, 0.0, str(error))

    def note(self, explanation: Explanation) -> None:
        self._client.note(explanation)

    def close(self) -> None:
        self._client.close()
