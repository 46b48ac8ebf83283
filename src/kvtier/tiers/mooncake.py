"""A Mooncake pool as a tier: memory that hosts lend each other, over TCP or RDMA. Thread-safe.

Its leases are weak: a block may be gone when it is fetched. Blocks on a host that is down are misses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import EmptyLease, Lease, weak_lease
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.mooncake.blocks import MooncakeBlocks
from kvtier.stores.mooncake.config import MooncakeConfig, open_blocks
from kvtier.tiers.seen_blocks import SeenBlocks
from kvtier.tiers.tier import PlainTier

_BYTES_PER_S = 100e6
"""The bandwidth that deadlines assume: the slowest network worth using."""
_DROP_ALL_S = 60.0
_FIRST_ANSWER_S = 5.0


def open_mooncake_tier(
    config: MooncakeConfig, layout: KvLayout, namespace: Namespace, metrics: TierMetrics, name: str = "mooncake"
) -> MooncakeTier:
    """Open the tier, and wait a moment for the pool, so that the first request can hit. It may also answer later.

    Raises `ConfigError`, for instance if Mooncake's library cannot be loaded.
    """

    def count(kind: str, times: int) -> None:
        metrics.failures.labels(tier=name, kind=kind).inc(times)

    blocks = open_blocks(config, namespace, layout.block_bytes, count)
    try:
        blocks.client.wait_until_ready(_FIRST_ANSWER_S, first_word_only=True)
    except BaseException:
        blocks.close()
        raise
    return MooncakeTier(blocks, layout, timeout_s=config.timeout_s, name=name)


class MooncakeTier(PlainTier):
    """Owns `blocks`. A call waits at most `timeout_s`, plus the time that its bytes should take."""

    def __init__(self, blocks: MooncakeBlocks, layout: KvLayout, *, timeout_s: float, name: str = "mooncake") -> None:
        self.name = name
        self.layout = layout
        self.blocks = blocks
        self._timeout_s = timeout_s
        self._seen = SeenBlocks()

    @property
    def holds_leases(self) -> bool:
        return False

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        if not hashes:
            return EmptyLease(MatchEnd.ALL)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        found = self.blocks.find(hashes, deadline, prefix_only=True)
        num_blocks = found.index(False) if False in found else len(found)
        self._seen.note(hashes[:num_blocks])
        ended = self._ending(hashes[num_blocks]) if num_blocks < len(hashes) else MatchEnd.ALL
        if not num_blocks:
            return EmptyLease(ended)
        return weak_lease(hashes[:num_blocks], self.layout.block_bytes, ended, self._pull)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        views = byte_views(blocks, self.layout.block_bytes, writable=False)
        found = self.blocks.find(hashes, time.monotonic() + self._timeout_s)
        absent = [position for position, is_there in enumerate(found) if not is_there]
        if not absent:
            return 0
        wanted = [hashes[position] for position in absent]
        written = self.blocks.put(wanted, [views[position] for position in absent], self._deadline(len(absent)))
        stored = [block_hash for block_hash, is_written in zip(wanted, written, strict=True) if is_written]
        self._seen.note(stored)
        return len(stored)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return self.blocks.find(hashes, time.monotonic() + self._timeout_s)

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        self._seen.forget(hashes)
        return self.blocks.drop(hashes, time.monotonic() + (_DROP_ALL_S if hashes is None else self._timeout_s))

    def close(self) -> None:
        self.blocks.close()

    def _pull(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        arrived = self.blocks.get(hashes, into, self._deadline(len(hashes)))
        return arrived.index(False) if False in arrived else len(arrived)

    def _ending(self, block_hash: BlockHash) -> MatchEnd:
        if self.blocks.has_failed(block_hash):
            return MatchEnd.TIER_DOWN
        return self._seen.ending(block_hash)

    def _deadline(self, num_blocks: int) -> float:
        return time.monotonic() + self._timeout_s + num_blocks * self.layout.block_bytes / _BYTES_PER_S
