"""Every kind of tier through the shipped contract suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import kvtier
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import CAPACITY_BLOCKS, LAYOUT, NAMESPACE, MakeTier, TierContract
from kvtier.tiers.host import HostTier
from kvtier.tiers.remote import RemoteTier
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
                return stack.enter_context(contextlib.closing(RemoteTier(client)))

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
                return stack.enter_context(contextlib.closing(RemoteTier(client)))

            yield make
