"""Every kind of tier through the shipped contract suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import kvtier
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import CAPACITY_BLOCKS, LAYOUT, NAMESPACE, MakeTier, TierContract, chain, payloads
from kvtier.tiers.host import HostTier
from kvtier.tiers.remote import RemoteTier, SingleServerTier
from kvtier.tiers.tier import Tier
from tests.support.waiting import CALL_S

MEMORY_BYTES = CAPACITY_BLOCKS * LAYOUT.slot_bytes
ALL_MEMORY = ("--max-leased", str(MEMORY_BYTES))


class TestHostTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                return stack.enter_context(contextlib.closing(HostTier(LAYOUT, MEMORY_BYTES)))

            yield make


class TestRemoteTierOverSharedMemory(TierContract):
    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                server = stack.enter_context(cache_server(*ALL_MEMORY, memory=str(MEMORY_BYTES)))
                client = kvtier.connect(server.unix, layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S)
                return stack.enter_context(contextlib.closing(SingleServerTier(client)))

            yield make


class TestRemoteTierOverTcp(TierContract):
    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                server = stack.enter_context(cache_server(*ALL_MEMORY, memory=str(MEMORY_BYTES), tcp=True))
                client = kvtier.connect(
                    server.tcp, token=server.token, layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S
                )
                return stack.enter_context(contextlib.closing(SingleServerTier(client)))

            yield make


@pytest.mark.slow
class TestReplicatedTier(TierContract):
    """Two servers of the whole size, every block on both."""

    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                servers = [stack.enter_context(cache_server(*ALL_MEMORY, memory=str(MEMORY_BYTES))) for _ in range(2)]
                client = kvtier.connect(
                    [server.unix for server in servers],
                    replicas=2,
                    layout=LAYOUT,
                    namespace=NAMESPACE,
                    timeout_s=CALL_S,
                )
                return stack.enter_context(contextlib.closing(RemoteTier(client)))

            yield make

    def test_a_tier_full_of_leases_takes_nothing_and_loses_nothing(self, tier: Tier) -> None:
        """A lease holds one copy of each block, so the other copies make room; the leased ones stay."""
        hashes = chain(1, CAPACITY_BLOCKS)
        assert tier.offer(hashes, payloads(hashes)) == CAPACITY_BLOCKS

        with tier.match(hashes) as lease:
            tier.offer(chain(2, CAPACITY_BLOCKS), payloads(chain(2, CAPACITY_BLOCKS)))
            assert [bytes(view) for view in lease.views()] == payloads(hashes)
