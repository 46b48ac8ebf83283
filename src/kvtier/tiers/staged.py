"""A tier out of reach of the device, with memory of this process through which its blocks pass. Thread-safe."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.retention import Granted
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease, Reservation
from kvtier.tiers.host import HostTier
from kvtier.tiers.retention import RetentionAsk
from kvtier.tiers.tier import PlainTier, StagingTier, Tier


class StagedTier(PlainTier):
    """The slots of `reserve` are in staging memory, and a commit sends them to `inner`, which this tier owns."""

    def __init__(self, inner: Tier, staging_bytes: int) -> None:
        self._inner = inner
        self._staging = HostTier(inner.layout, staging_bytes, "staging")

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def layout(self) -> KvLayout:
        return self._inner.layout

    @property
    def is_local(self) -> bool:
        """A device can write the slots, though no arena has all blocks of the tier."""
        return True

    @property
    def staging(self) -> StagingTier:
        return self._staging

    @property
    def generation(self) -> int:
        return self._inner.generation

    @property
    def holds_leases(self) -> bool:
        return self._inner.holds_leases

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        self._inner.learn(hashes)

    def announce(self, hashes: Sequence[BlockHash]) -> None:
        self._inner.announce(hashes)

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        self._inner.withdraw(hashes)

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return self._inner.match(hashes, timeout_s=timeout_s)

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        return self._inner.retain(hashes, ask)

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        """Slots for all `hashes`: only the commit finds out which blocks the tier has already."""
        positions = {block_hash: position for position, block_hash in reversed(list(enumerate(hashes)))}
        wanted = list(positions)
        stage = self._staging.stage(wanted)

        def commit(first: int, count: int) -> int:
            return self._inner.offer(wanted[first : first + count], stage.views()[first : first + count])

        return Reservation(
            self._staging.arena,
            stage.offsets,
            self.layout.block_bytes,
            list(positions.values()),
            (0, 0, 0),
            commit,
            stage.close,
            lambda: None,  # the staging reservation ends itself
        )

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        return self._inner.offer(hashes, blocks)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self._inner.contains(hashes)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        return self._inner.drop(hashes)

    def close(self) -> None:
        self._staging.close()
        self._inner.close()
