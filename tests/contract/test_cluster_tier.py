"""A Valkey cluster through the shipped contract suite: one node; and one of Redis, with TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvtier.blocks.hashing import BlockHash
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
from tests.support.certificates import needs_openssl
from tests.support.tls_server import node_tls
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S

EVICTION = ("--maxmemory-samples", "64", "--lazyfree-lazy-user-del", "no")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1, 0, *EVICTION) as running:
        yield running


@pytest.fixture(scope="module")
def tls_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    tls = node_tls(tmp_path_factory.mktemp("certificates"))
    with valkey_cluster(1, 0, *EVICTION, access=tls.access(), tls=tls) as running:
        yield running


class TestClusterTier(TierContract):
    @pytest.fixture
    def make_tier(self, cluster: ValkeyCluster) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                (node,) = cluster.primaries
                cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"0")
                cluster.call(node, b"FLUSHALL", b"SYNC")
                ca_file = None if node.tls is None else node.tls.certificate
                scheme = "tcp" if node.tls is None else "tls"
                config = ClusterConfig(valkey=(f"{scheme}://{node.address}",), ca_file=ca_file, timeout_s=CALL_S)
                tier = open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())
                stack.enter_context(contextlib.closing(tier))
                assert tier.wait_until_known(CALL_S)
                return tier

            yield make

    def test_a_flood_evicts_the_coldest_and_keeps_the_newest(self, tier: Tier, cluster: ValkeyCluster) -> None:
        """A node looks at one slot at a time for what would go first: of many slots, that is not always the coldest."""
        seeds = [9100 + number for number in range(CAPACITY_BLOCKS)]
        for seed in seeds:
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
        flags = flooded(tier, cluster, [chain(seed, 1)[0] for seed in seeds])

        for seed, is_there in zip(seeds, flags, strict=True):
            assert fetch_all(tier, chain(seed, 1)) == payloads(chain(seed, 1))[: int(is_there)]
            with tier.match(chain(seed, 1)) as lease:
                assert lease.ended is (MatchEnd.ALL if is_there else MatchEnd.EVICTED)

    def test_a_match_tells_what_was_evicted_from_what_was_never_there_or_was_dropped(
        self, tier: Tier, cluster: ValkeyCluster
    ) -> None:
        hashes = chain(9002, 4)
        tier.offer(hashes, payloads(hashes))
        flooded(tier, cluster, hashes)

        assert tier.match(hashes[3:]).ended is MatchEnd.EVICTED
        tier.drop(hashes)
        assert tier.match(hashes[3:]).ended is MatchEnd.NEVER_STORED

    def test_a_prefix_loses_its_end_before_its_beginning(self, tier: Tier, cluster: ValkeyCluster) -> None:
        """A node looks at a sample of its keys: it may pass over a block of the end, but never takes the beginning."""
        hashes = chain(9001, CAPACITY_BLOCKS // 2)
        tier.offer(hashes, payloads(hashes))
        flags = flooded(tier, cluster, hashes)

        assert not all(flags)
        assert all(flags[: len(flags) // 2])


@needs_openssl
@pytest.mark.slow
class TestClusterTierOverTls(TestClusterTier):
    @pytest.fixture
    def cluster(self, tls_cluster: ValkeyCluster) -> ValkeyCluster:
        return tls_cluster


def flooded(tier: Tier, cluster: ValkeyCluster, hashes: list[BlockHash]) -> list[bool]:
    """Let the node have no more memory than now, and offer blocks until some of `hashes` are gone: which are there.

    They are of no other test: a node remembers which keys it would evict next, even when it has lost all since.
    """
    (node,) = cluster.primaries
    cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"%d" % cluster.used_bytes(node))
    for seed in range(1000, 5000):
        tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
        if not all(tier.contains(hashes)):
            cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"0")  # reading evicts, too: replies take memory
            return tier.contains(hashes)
    raise AssertionError("nothing was evicted")
