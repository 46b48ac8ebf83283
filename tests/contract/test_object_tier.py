"""Object stores through the shipped contract suite: a folder, and S3 over HTTP. A segment is one block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.objects.config import ObjectsConfig, open_blocks
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
from kvtier.tiers.objects import ObjectTier, open_object_tier
from kvtier.tiers.tier import Tier
from tests.support.object_store import object_server
from tests.support.waiting import CALL_S, LIMIT_S


class _WrittenAtOnce(ObjectTier):
    """Waits for what it writes behind. Parts of prompts are prompts, as a segment is one block."""

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        num_taken = 0
        for first in range(0, len(hashes), 4):
            part = hashes[first : first + 4]
            self.learn(part)
            num_taken += super().offer(part, blocks[first : first + 4])
            assert self.flush(LIMIT_S)
        return num_taken

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self.learn(hashes)
        return super().match(hashes, timeout_s=timeout_s)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        self.learn(hashes)
        return [super(_WrittenAtOnce, self).contains([block_hash])[0] for block_hash in hashes]


def opened(config: ObjectsConfig) -> ObjectTier:
    blocks = open_blocks(config, NAMESPACE, LAYOUT.block_bytes, lambda kind, count: None)
    return _WrittenAtOnce(blocks, LAYOUT, timeout_s=CALL_S)


class ObjectTierContract(TierContract):
    def test_a_flood_evicts_the_coldest_and_keeps_the_newest(self, tier: Tier) -> None:
        """Nothing is evicted: what an object store keeps is for its own rules to say."""
        for seed in range(100, 100 + 3 * CAPACITY_BLOCKS):
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))

        assert all(fetch_all(tier, chain(seed, 1)) for seed in range(100, 100 + 3 * CAPACITY_BLOCKS))

    def test_a_match_tells_what_was_evicted_from_what_was_never_there_or_was_dropped(self, tier: Tier) -> None:
        hashes = chain(1, 3)
        tier.offer(hashes, payloads(hashes))
        tier.match(hashes).release()
        assert isinstance(tier, ObjectTier)
        tier._blocks.drop(hashes[1:2], time.monotonic() + CALL_S)  # as its own rules would

        with tier.match(hashes) as lease:
            assert (lease.num_blocks, lease.ended) == (1, MatchEnd.EVICTED)
        tier.drop(hashes)
        assert tier.match(hashes).ended is MatchEnd.NEVER_STORED

    def test_a_prefix_loses_its_end_before_its_beginning(self, tier: Tier) -> None:
        """It loses nothing, but counts only up to the first that is missing."""
        hashes = chain(1, 4)
        tier.offer(hashes, payloads(hashes))
        tier.drop(hashes[2:3])

        assert fetch_all(tier, hashes) == payloads(hashes)[:2]


class TestObjectsInAFolder(ObjectTierContract):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                folder = tmp_path / str(len(list(tmp_path.iterdir())))
                folder.mkdir()
                tier = opened(ObjectsConfig(url=folder.as_uri(), segment=1, timeout_s=CALL_S))
                return stack.enter_context(contextlib.closing(tier))

            yield make


@pytest.mark.slow
class TestObjectsOverHttp(ObjectTierContract):
    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                server = stack.enter_context(object_server())
                tier = opened(ObjectsConfig(url=server.url, settings=server.settings, segment=1, timeout_s=CALL_S))
                return stack.enter_context(contextlib.closing(tier))

            yield make


def test_two_processes_of_one_namespace_share_objects(tmp_path: Path) -> None:
    config = ObjectsConfig(url=tmp_path.as_uri(), segment=4, timeout_s=CALL_S)
    hashes = chain(1, 10)
    with contextlib.closing(open_object_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as one:
        one.learn(hashes)
        assert one.offer(hashes, payloads(hashes)) == 10
        assert one.flush(LIMIT_S)
    with contextlib.closing(open_object_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as other:
        assert fetch_all(other, hashes) == [], "where a block stands is not known yet"
        other.learn(hashes)
        assert fetch_all(other, hashes) == payloads(hashes)[:8], "what is behind the last whole segment is not kept"
        assert fetch_all(other, hashes[3:7]) == payloads(hashes[3:7])
