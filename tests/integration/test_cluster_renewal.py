"""A cluster does not lose the blocks that hosts use from their own memory first: their times to live are renewed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.client.client import CacheClient
from kvtier.stores.valkey.blocks import ClusterBlocks
from kvtier.stores.valkey.cluster import Cluster
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.node import NodeAccess
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, payloads
from kvtier.tiers.cluster import ClusterTier
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from tests.support.clustered_servers import SEGMENT, client_above, num_stored
from tests.support.server_load import got
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

TTL_S = 7 * 86400.0
HOUR_S = 3600.0
BEGINNING = chain(1, 6)
TAILS = [chain(seed, 4) for seed in range(2, 5)]


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ValkeyCluster) -> ValkeyCluster:
    """One node, and empty."""
    running.call(running.primaries[0], b"FLUSHALL", b"SYNC")
    return running


class LaterClock:
    """The time of day, and what the test adds to it."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.added_s


def expiries_ms(cluster: ValkeyCluster, hashes: list[BlockHash]) -> list[int]:
    """When each of these goes; -2 for what is not there."""
    (node,) = cluster.primaries
    listed = cluster.call(node, b"KEYS", b"kvt1:*")
    assert isinstance(listed, list)
    names = {name.rpartition(b":")[2]: name for name in listed if isinstance(name, bytes)}
    found = [cluster.call(node, b"PEXPIRETIME", names.get(each.hex().encode(), b"kvt1:none")) for each in hashes]
    return [each for each in found if isinstance(each, int)]


def is_in_order(cluster: ValkeyCluster, hashes: list[BlockHash]) -> bool:
    """No block goes before one that is further into the prompt."""
    times = expiries_ms(cluster, hashes)
    return min(times) > 0 and times == sorted(times, reverse=True)


@contextlib.contextmanager
def tier_of(cluster: ValkeyCluster, clock: LaterClock) -> Iterator[ClusterTier]:
    nodes = Cluster(cluster.seeds, NodeAccess(plaintext=True))
    blocks = ClusterBlocks(nodes, NAMESPACE, LAYOUT.block_bytes, ttl_s=TTL_S, segment_blocks=SEGMENT, clock=clock)
    with contextlib.closing(ClusterTier(blocks, LAYOUT, timeout_s=CALL_S)) as tier:
        assert tier.wait_until_known(CALL_S)
        yield tier


def test_a_beginning_in_host_memory_is_renewed_with_what_follows_it(cluster: ValkeyCluster) -> None:
    clock = LaterClock()
    with contextlib.closing(HostTier(LAYOUT, 64 * LAYOUT.slot_bytes)) as host, tier_of(cluster, clock) as below:
        host.offer(BEGINNING, payloads(BEGINNING))
        hierarchy = Hierarchy([host, below])
        for tail in TAILS:
            prompt = [*BEGINNING, *tail]
            hierarchy.learn(prompt)
            with hierarchy.match(prompt) as lease:
                assert lease.blocks_by_tier == {"host": len(BEGINNING)}
            below.offer(prompt, payloads(prompt))
            wait_until(functools.partial(is_in_order, cluster, prompt))
            assert min(expiries_ms(cluster, prompt)) >= (clock() - CALL_S + TTL_S) * 1000
            clock.added_s += HOUR_S


def store(client: CacheClient, hashes: list[BlockHash]) -> None:
    """Behave like an engine: match first, and compute the missing blocks."""
    with client.match(hashes) as lease:
        num_found = lease.wait()
    client.set(hashes[num_found:], payloads(hashes[num_found:]))


@pytest.mark.parametrize("asks_for", ["all", "the end"])
def test_a_beginning_in_memory_does_not_go_before_what_follows_it(cluster: ValkeyCluster, asks_for: str) -> None:
    """In the server's, or in its client's own, which asks the server only for the end."""
    with client_above(cluster) as client:
        for number, tail in enumerate(TAILS, 1):
            prompt = [*BEGINNING, *tail]
            client.learn(prompt)
            store(client, prompt if asks_for == "all" or number == 1 else tail)
            wait_until(lambda count=number: num_stored(cluster) == len(BEGINNING) + 4 * count)
            assert is_in_order(cluster, prompt)
            time.sleep(0.05)  # longer than places count


def test_what_a_server_has_in_memory_is_renewed_when_it_is_used(cluster: ValkeyCluster) -> None:
    clock = LaterClock()
    prompt = [*BEGINNING, *TAILS[0]]
    config = ClusterConfig(valkey=tuple(f"tcp://{seed}" for seed in cluster.seeds), segment=SEGMENT, timeout_s=CALL_S)
    with contextlib.closing(ClusterSpaces(config, clock=clock)) as spaces:
        assert spaces.wait_until_known(CALL_S)
        space = cast(MemorySpace, SimpleNamespace(namespace=NAMESPACE, block_bytes=LAYOUT.block_bytes))
        blocks = spaces.of(space)
        blocks.learn(prompt)
        blocks.put(prompt, [memoryview(each) for each in payloads(prompt)], CALL_S)
        for absent in ([], TAILS[0]):
            clock.added_s += HOUR_S
            due_ms = int((clock() + TTL_S) * 1000) - len(prompt)
            spaces.use(space, prompt, absent)
            spaces.look(space, absent)
            wait_until(lambda at=due_ms: min(expiries_ms(cluster, BEGINNING)) >= at)
            assert is_in_order(cluster, prompt)


def test_a_host_that_has_not_asked_for_long_shortens_nothing(cluster: ValkeyCluster) -> None:
    early, late = LaterClock(), LaterClock()
    late.added_s = HOUR_S
    with tier_of(cluster, early) as one, tier_of(cluster, late) as other:
        one.match(BEGINNING).release()
        one.offer(BEGINNING, payloads(BEGINNING))
        other.match(BEGINNING).release()
        before = expiries_ms(cluster, BEGINNING)
        assert one.offer(BEGINNING, payloads(BEGINNING)) == 0, "it finds them there"
        assert expiries_ms(cluster, BEGINNING) == before


def test_a_prompt_that_is_used_from_memory_again_is_not_written_again(cluster: ValkeyCluster) -> None:
    prompt = [*BEGINNING, *TAILS[0]]
    with client_above(cluster) as client:
        store(client, prompt)
        wait_until(lambda: num_stored(cluster) == len(prompt))
        for _ in range(3):
            assert got(client, prompt) == payloads(prompt)
        wait_until(lambda: client.stats()["cluster_queued_bytes"] == 0)
        assert client.stats()["cluster_written_blocks"] == len(prompt)
