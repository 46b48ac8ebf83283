"""A Valkey or Redis Cluster as a tier: blocks that hosts share. Thread-safe.

Its leases are weak: a block may be gone when it is fetched. Blocks on a node that is down are misses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.errors import ConfigError
from kvtier.memory.copying import Buffer, byte_views
from kvtier.memory.lease import EmptyLease, Lease, weak_lease
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.announcements import Announcer, ComputedElsewhere
from kvtier.stores.valkey.blocks import ClusterBlocks
from kvtier.stores.valkey.cluster import Cluster
from kvtier.stores.valkey.config import ClusterConfig, blocks_in, open_cluster
from kvtier.stores.valkey.described import DescribedNamespaces
from kvtier.stores.valkey.renewals import Renewals
from kvtier.tiers.cluster_explaining import AskedCluster
from kvtier.tiers.seen_blocks import SeenBlocks
from kvtier.tiers.tier import PlainTier

_BYTES_PER_S = 50e6
"""The bandwidth that deadlines assume: the slowest network worth using."""
_DROP_ALL_S = 60.0
_FIRST_ANSWER_S = 5.0


def open_cluster_tier(
    config: ClusterConfig,
    layout: KvLayout,
    namespace: Namespace | NamespaceFields,
    metrics: TierMetrics,
    name: str = "cluster",
    *,
    model: str = "",
) -> ClusterTier:
    """Open the tier, and wait a moment for the cluster, so that the first request can hit. It may also answer later.

    A namespace whose fields are given is described there, as that of `model`. Raises `ConfigError`.
    """

    def count(kind: str, times: int) -> None:
        metrics.failures.labels(tier=name, kind=kind).inc(times)

    cluster = open_cluster(config)
    digest, fields = (namespace.digest(), namespace) if isinstance(namespace, NamespaceFields) else (namespace, None)
    tier = ClusterTier(
        blocks_in(cluster, config, digest, layout.block_bytes, count),
        layout,
        timeout_s=config.timeout_s,
        name=name,
        computes_once=config.compute_once,
        description=None if fields is None else _Description(cluster, config, fields, model),
        asked=AskedCluster(cluster, config),
    )
    tier.wait_until_known(min(config.timeout_s, _FIRST_ANSWER_S))
    return tier


class _Description:
    """Tells other hosts what a namespace covers, behind the first blocks that are stored there, and now and then."""

    def __init__(self, cluster: Cluster, config: ClusterConfig, fields: NamespaceFields, model: str) -> None:
        self._described = DescribedNamespaces(cluster, ttl_s=config.ttl_s)
        self._timeout_s = config.timeout_s
        self._fields = fields
        self._namespace = fields.digest()
        self._model = model

    def renew(self) -> None:
        """Waits for the cluster, if it is time."""
        if self._described.is_due(self._namespace):
            text, block_tokens = self._fields.description(), self._fields.layout.block_tokens
            self._described.describe(self._namespace, self._model, block_tokens, text, self._timeout_s)


class ClusterTier(PlainTier):
    """Owns `blocks`. A call waits at most `timeout_s`, plus the time that its bytes should take.

    With `computes_once`, a match that ends at a block that another host is computing returns PENDING.
    """

    def __init__(
        self,
        blocks: ClusterBlocks,
        layout: KvLayout,
        *,
        timeout_s: float,
        name: str = "cluster",
        computes_once: bool = False,
        description: _Description | None = None,
        asked: AskedCluster | None = None,
    ) -> None:
        self.name = name
        self._asked = asked
        self._description = description
        self.layout = layout
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._seen = SeenBlocks()
        self._renewals = Renewals()
        self._announcer = Announcer() if computes_once else None
        self._computed = None if self._announcer is None else ComputedElsewhere(self._announcer)

    @property
    def holds_leases(self) -> bool:
        return False

    @property
    def asked(self) -> AskedCluster | None:
        return self._asked

    def wait_until_known(self, timeout_s: float) -> bool:
        """Wait until the cluster has answered. Returns whether it has."""
        return self._blocks.wait_until_known(timeout_s)

    def keys_of(self, hashes: Sequence[BlockHash]) -> tuple[list[bytes], list[int]]:
        """The name of each block in the cluster, and its slot."""
        return self._blocks.keys_of(hashes)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        self._blocks.learn(hashes)

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        if not hashes:
            return EmptyLease(MatchEnd.ALL)
        num_blocks, ended = self._find(hashes, self._timeout_s if timeout_s is None else timeout_s)
        self._seen.note(hashes[:num_blocks])
        if not num_blocks:
            return EmptyLease(ended)
        return weak_lease(hashes[:num_blocks], self.layout.block_bytes, ended, self._pull)

    def _find(self, hashes: Sequence[BlockHash], timeout_s: float) -> tuple[int, MatchEnd]:
        """The number of leading blocks that the cluster has, and why there are no more."""
        computed = self._computed
        if computed is not None and (position := computed.recall(hashes)) is not None:
            return position, MatchEnd.PENDING
        deadline = time.monotonic() + timeout_s
        self._renewals.ask(self._blocks, hashes, wanted=hashes)
        found = self._blocks.ask(hashes, timeout_s)
        position = next((position for position, is_there in enumerate(found) if not is_there), len(found))
        if position == len(hashes):
            return position, MatchEnd.ALL
        if found[position] is None:
            return position, MatchEnd.TIER_DOWN
        if computed is not None and computed.ask(self._blocks, hashes, position, deadline - time.monotonic()):
            return position, MatchEnd.PENDING
        return position, self._seen.ending(hashes[position])

    def announce(self, hashes: Sequence[BlockHash]) -> None:
        if self._announcer is not None:
            self._announcer.announce(self._blocks, hashes)

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        if self._announcer is not None:
            self._announcer.end(self._blocks, hashes)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        try:
            return self._offer(hashes, blocks)
        finally:
            self.withdraw(hashes)  # the blocks are in the cluster now, or never will be

    def _offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        if len(hashes) != len(blocks):
            raise ConfigError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        views = byte_views(blocks, self.layout.block_bytes, writable=False)
        found = self._blocks.touch(hashes, self._timeout_s)
        absent = [position for position, is_there in enumerate(found) if is_there is False]
        if not absent:
            self._describe_if(any(found))
            return 0
        wanted = [hashes[position] for position in absent]
        written = self._blocks.put(wanted, [views[position] for position in absent], self._transfer_s(len(absent)))
        stored = [block_hash for block_hash, is_written in zip(wanted, written, strict=True) if is_written]
        self._seen.note(stored)
        self._describe_if(bool(stored))
        return len(stored)

    def _describe_if(self, has_blocks: bool) -> None:
        if has_blocks and self._description is not None:
            self._description.renew()

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [is_there is True for is_there in self._blocks.contains(hashes, self._timeout_s)]

    def drop(self, hashes: Sequence[BlockHash] | None = None) -> int:
        self._seen.forget(hashes)
        if hashes is None:
            return self._blocks.drop_all(_DROP_ALL_S)
        return self._blocks.drop(hashes, self._timeout_s)

    def close(self) -> None:
        if self._announcer is not None:
            self._announcer.close()
        self._renewals.close()
        self._blocks.close()

    def _pull(self, hashes: Sequence[BlockHash], into: Sequence[memoryview]) -> int:
        arrived = self._blocks.get(hashes, into, self._transfer_s(len(hashes)))
        return arrived.index(False) if False in arrived else len(arrived)

    def _transfer_s(self, num_blocks: int) -> float:
        return self._timeout_s + num_blocks * self.layout.block_bytes / _BYTES_PER_S
