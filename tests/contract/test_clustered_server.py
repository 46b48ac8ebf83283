"""A cache server above a Valkey cluster through the shipped contract suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import CAPACITY_BLOCKS, LAYOUT, MakeTier, TierContract
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.tier import Tier
from tests.support.clustered_servers import cluster_flags, connected
from tests.support.valkey import ValkeyCluster, valkey_cluster

pytestmark = pytest.mark.slow  # each case starts a server

MEMORY = str(CAPACITY_BLOCKS * LAYOUT.slot_bytes)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1) as running:
        yield running


class TestServerAboveCluster(TierContract):
    @pytest.fixture(params=[False, True], ids=["shared memory", "TCP"])
    def make_tier(self, cluster: ValkeyCluster, request: pytest.FixtureRequest) -> Iterator[MakeTier]:
        tcp: bool = request.param
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                (node,) = cluster.primaries
                cluster.call(node, b"FLUSHALL", b"SYNC")
                options = (*cluster_flags(cluster), "--max-leased", MEMORY)
                server = stack.enter_context(cache_server(*options, memory=MEMORY, tcp=tcp))
                return stack.enter_context(contextlib.closing(RemoteTier(connected(server, tcp=tcp))))

            yield make
