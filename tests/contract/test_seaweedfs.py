"""A real object store, SeaweedFS, through the contract suite, and killed meanwhile. `make test-objects` runs it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import TierError
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, MakeTier, chain, fetch_all, payloads
from kvtier.tiers.objects import open_object_tier
from kvtier.tiers.tier import Tier
from tests.contract.test_object_tier import ObjectTierContract, opened
from tests.support.seaweedfs import SeaweedFs, seaweedfs
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

pytestmark = pytest.mark.slow

FOLDERS = itertools.count()


@pytest.fixture(scope="module")
def store() -> Iterator[SeaweedFs]:
    with seaweedfs() as running:
        yield running


def config_of(store: SeaweedFs, segment: int, timeout_s: float = CALL_S) -> ObjectsConfig:
    """A folder of its own."""
    url = store.url(f"kv{next(FOLDERS)}")
    return ObjectsConfig(url=url, settings=store.settings, segment=segment, timeout_s=timeout_s)


class TestSeaweedFs(ObjectTierContract):
    @pytest.fixture
    def make_tier(self, store: SeaweedFs) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                return stack.enter_context(contextlib.closing(opened(config_of(store, segment=1))))

            yield make


def test_segments_outlive_a_store_that_is_killed_and_started_again() -> None:
    """While it is down everything is a miss."""
    hashes = chain(1, 12)
    with seaweedfs() as store:
        config = config_of(store, segment=4, timeout_s=5.0)
        with contextlib.closing(open_object_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as one:
            one.learn(hashes)
            assert one.offer(hashes, payloads(hashes)) == 12
            assert one.flush(LIMIT_S)
        with contextlib.closing(open_object_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as other:
            other.learn(hashes)
            wait_until(lambda: fetch_all(other, hashes) == payloads(hashes))
            store.stop()
            assert found(other, hashes) != payloads(hashes)
            store.start()
            wait_until(lambda: found(other, hashes) == payloads(hashes))


def found(tier: Tier, hashes: list[BlockHash]) -> list[bytes]:
    """Nothing while the store is down: a tier may fail then, and a `Hierarchy` makes a miss of it."""
    try:
        return fetch_all(tier, hashes)
    except TierError:
        return []
