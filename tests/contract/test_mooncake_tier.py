"""A Mooncake pool through the shipped contract suite: over a stand-in, and over the real one where it is installed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from kvtier.blocks.match_end import MatchEnd
from kvtier.observe.metrics import TierMetrics
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
from kvtier.tiers.mooncake import MooncakeTier, open_mooncake_tier
from kvtier.tiers.tier import Tier
from tests.support.mooncake import stand_in_master
from tests.support.waiting import CALL_S, LIMIT_S


class MooncakeTierContract(TierContract):
    def test_a_flood_evicts_the_coldest_and_keeps_the_newest(self, tier: Tier) -> None:
        """Nothing is evicted here: what a pool lets go, and when, is for its master to say."""
        seeds = range(100, 100 + 3 * CAPACITY_BLOCKS)
        for seed in seeds:
            assert tier.offer(chain(seed, 1), payloads(chain(seed, 1))) == 1

        assert all(fetch_all(tier, chain(seed, 1)) == payloads(chain(seed, 1)) for seed in seeds)

    def test_a_match_tells_what_was_evicted_from_what_was_never_there_or_was_dropped(self, tier: Tier) -> None:
        hashes = chain(1, 3)
        tier.offer(hashes, payloads(hashes))
        assert isinstance(tier, MooncakeTier)
        assert tier.blocks.drop(hashes[1:2], time.monotonic() + CALL_S) == 1  # as its master would

        with tier.match(hashes) as lease:
            assert (lease.num_blocks, lease.ended) == (1, MatchEnd.EVICTED)
        tier.drop(hashes)
        assert tier.match(hashes).ended is MatchEnd.NEVER_STORED

    def test_a_prefix_loses_its_end_before_its_beginning(self, tier: Tier) -> None:
        """It loses nothing by itself, but counts only up to the first that is missing."""
        hashes = chain(1, 4)
        tier.offer(hashes, payloads(hashes))
        tier.drop(hashes[2:3])

        assert fetch_all(tier, hashes) == payloads(hashes)[:2]

    def test_more_blocks_than_have_room_on_their_way_come_back_in_order(self, tier: Tier) -> None:
        hashes = chain(5, 300)
        assert tier.offer(hashes, payloads(hashes)) == 300

        assert fetch_all(tier, hashes) == payloads(hashes)


@pytest.mark.slow
class TestMooncakeStandIn(MooncakeTierContract):
    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                master = stack.enter_context(stand_in_master())
                tier = open_mooncake_tier(master.config(), LAYOUT, NAMESPACE, TierMetrics())
                stack.enter_context(contextlib.closing(tier))
                assert tier.blocks.client.wait_until_ready(LIMIT_S), tier.blocks.client.why_not
                return tier

            yield make
