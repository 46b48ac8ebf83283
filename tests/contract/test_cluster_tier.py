"""A Valkey cluster through the shipped contract suite: one node, whose memory has room for a few blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvtier.blocks.match_end import MatchEnd
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.testing.tier_contract import (
    CAPACITY_BLOCKS,
    LAYOUT,
    NAMESPACE,
    MakeTier,
    TierContract,
    chain,
    fetch_all,
    payloads,
)
from kvtier.tiers.cluster import open_cluster_tier
from kvtier.tiers.tier import Tier
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S

_ROOM_BLOCKS = CAPACITY_BLOCKS + 2
_NUM_MEASURED = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1, 0, "--maxmemory-samples", "64", "--lazyfree-lazy-user-del", "no") as running:
        yield running


class TestClusterTier(TierContract):
    most_blocks = _ROOM_BLOCKS + 2

    @pytest.fixture
    def make_tier(self, cluster: ValkeyCluster) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                (node,) = cluster.primaries
                cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"0")
                cluster.call(node, b"FLUSHALL", b"SYNC")
                config = ClusterConfig(valkey=(f"tcp://{node.address}",), timeout_s=CALL_S)
                tier = open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())
                stack.enter_context(contextlib.closing(tier))
                assert tier.wait_until_known(CALL_S)
                hashes = chain(999, _NUM_MEASURED)
                assert tier.offer(hashes, payloads(hashes)) == _NUM_MEASURED
                full_bytes = cluster.used_bytes(node)
                block_bytes = cluster.call(node, b"MEMORY", b"USAGE", cluster.call(node, b"RANDOMKEY"))
                assert isinstance(block_bytes, int)
                tier.drop()
                room = full_bytes + (_ROOM_BLOCKS - _NUM_MEASURED) * block_bytes
                cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"%d" % room)
                return tier

            yield make

    def test_a_flood_evicts_the_coldest_and_keeps_the_newest(self, tier: Tier) -> None:
        """A node looks at one slot at a time for what would go first: of many slots, that is not always the coldest."""
        seeds = range(100, 100 + 3 * CAPACITY_BLOCKS)
        for seed in seeds:
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))

        flags = tier.contains([chain(seed, 1)[0] for seed in seeds])
        assert 1 <= sum(flags) <= self.most_blocks
        for seed, is_there in zip(seeds, flags, strict=True):
            assert fetch_all(tier, chain(seed, 1)) == payloads(chain(seed, 1))[: int(is_there)]

    def test_a_match_tells_what_was_evicted_from_what_was_never_there_or_was_dropped(self, tier: Tier) -> None:
        seeds = range(100, 100 + 3 * CAPACITY_BLOCKS)
        for seed in seeds:
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
        flags = tier.contains([chain(seed, 1)[0] for seed in seeds])
        gone = chain(seeds[flags.index(False)], 1)
        there = chain(seeds[flags.index(True)], 2)

        assert tier.match(gone).ended is MatchEnd.EVICTED
        with tier.match(there) as lease:
            assert (lease.num_blocks, lease.ended) == (1, MatchEnd.NEVER_STORED)
        tier.drop(there)
        tier.drop(gone)
        assert tier.match(there).ended is MatchEnd.NEVER_STORED
        assert tier.match(gone).ended is MatchEnd.NEVER_STORED
