"""Hosts wait for blocks that another host computes: announced in a cluster, until stored, given up, or dead."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import CacheClient
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.testing.servers import cache_server
from kvtier.testing.signals import send_signal
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, fetch_all, payloads
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from tests.support.clustered_servers import SEGMENT, client_above, cluster_flags, connected
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ValkeyCluster) -> ValkeyCluster:
    """One node, and empty."""
    running.call(running.primaries[0], b"FLUSHALL", b"SYNC")
    return running


def config_of(cluster: ValkeyCluster, *, compute_once: bool = True) -> ClusterConfig:
    nodes = tuple(f"tcp://{seed}" for seed in cluster.seeds)
    return ClusterConfig(valkey=nodes, timeout_s=CALL_S, segment=SEGMENT, compute_once=compute_once)


@contextlib.contextmanager
def engine_tier(cluster: ValkeyCluster, *, compute_once: bool = True) -> Iterator[ClusterTier]:
    """The tier of an engine directly above the cluster."""
    config = config_of(cluster, compute_once=compute_once)
    with contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as tier:
        assert tier.wait_until_known(CALL_S)
        yield tier


def ended(host: CacheClient | ClusterTier, hashes: list[BlockHash]) -> tuple[int, MatchEnd]:
    """How many blocks a host finds, in the cluster or in its server, and what ends the match."""
    if isinstance(host, ClusterTier):
        with host.match(hashes) as lease:
            return lease.num_blocks, lease.ended
    with host.match_lazily(hashes) as lease:
        return lease.num_blocks + lease.num_stored, lease.ended


def announce(engine: ClusterTier, hashes: list[BlockHash]) -> None:
    """Behave like an engine that begins to compute a prompt."""
    engine.learn(hashes)
    engine.announce(hashes)


def test_blocks_under_way_are_pending_on_every_other_host_until_they_are_stored(cluster: ValkeyCluster) -> None:
    hashes = chain(1, 8)
    with client_above(cluster) as one, client_above(cluster) as other, engine_tier(cluster) as engine:
        assert ended(one, hashes) == (0, MatchEnd.NEVER_STORED)
        with one.reserve(hashes) as reservation:
            wait_until(lambda: ended(other, hashes) == (0, MatchEnd.PENDING))
            wait_until(lambda: ended(engine, hashes) == (0, MatchEnd.PENDING))
            for view, payload in zip(reservation.views()[:3], payloads(hashes[:3]), strict=True):
                view[:] = payload
            assert reservation.commit(0, 3) == 3
            wait_until(lambda: ended(other, hashes) == (3, MatchEnd.PENDING))
            wait_until(lambda: ended(engine, hashes) == (3, MatchEnd.PENDING))
            for view, payload in zip(reservation.views()[3:], payloads(hashes[3:]), strict=True):
                view[:] = payload
            assert reservation.commit(3, 5) == 5
        wait_until(lambda: ended(other, hashes) == (8, MatchEnd.ALL))
        wait_until(lambda: fetch_all(engine, hashes) == payloads(hashes), "an answer holds for a moment")


def test_what_is_given_up_is_not_waited_for(cluster: ValkeyCluster) -> None:
    hashes = chain(2, 8)
    with client_above(cluster) as one, engine_tier(cluster) as engine:
        one.learn(hashes)
        with one.reserve(hashes):
            wait_until(lambda: ended(engine, hashes) == (0, MatchEnd.PENDING))
        wait_until(lambda: ended(engine, hashes) == (0, MatchEnd.NEVER_STORED))
        assert ended(one, hashes) == (0, MatchEnd.NEVER_STORED), "nobody waits for its own"

        announce(engine, hashes)
        wait_until(lambda: ended(one, hashes) == (0, MatchEnd.PENDING))
        assert ended(engine, hashes) == (0, MatchEnd.NEVER_STORED)
        engine.withdraw(hashes[:4])
        wait_until(lambda: ended(one, hashes) == (0, MatchEnd.NEVER_STORED))
        engine.offer(hashes[:4], payloads(hashes[:4]))
        wait_until(lambda: ended(one, hashes) == (4, MatchEnd.PENDING))
        engine.offer(hashes[4:], payloads(hashes[4:]))
        wait_until(lambda: ended(one, hashes) == (8, MatchEnd.ALL))


def test_a_block_that_is_computed_for_long_stays_announced(cluster: ValkeyCluster) -> None:
    """Its key is made anew, also when the cluster has evicted it."""
    hashes = chain(3, 2)
    (node,) = cluster.primaries
    with engine_tier(cluster) as one, engine_tier(cluster) as other:
        announce(one, hashes)
        wait_until(lambda: ended(other, hashes)[1] is MatchEnd.PENDING)
        cluster.call(node, b"FLUSHALL", b"SYNC")
        wait_until(lambda: ended(other, hashes)[1] is MatchEnd.NEVER_STORED)
        wait_until(lambda: ended(other, hashes)[1] is MatchEnd.PENDING)
    with engine_tier(cluster) as other:
        assert ended(other, hashes)[1] is MatchEnd.NEVER_STORED, "whoever closes gives up what it has announced"


def test_hosts_that_compute_once_switched_off_neither_wait_nor_announce(cluster: ValkeyCluster) -> None:
    hashes, others = chain(4, 4), chain(5, 4)
    with (
        client_above(cluster, "--no-cluster-compute-once") as off,
        engine_tier(cluster, compute_once=False) as engine_off,
        engine_tier(cluster) as engine,
    ):
        announce(engine, hashes)
        with engine_tier(cluster) as third:
            wait_until(lambda: ended(third, hashes)[1] is MatchEnd.PENDING)
        assert ended(off, hashes)[1] is MatchEnd.NEVER_STORED
        assert ended(engine_off, hashes)[1] is MatchEnd.NEVER_STORED
        off.learn(others)
        with off.reserve(others):
            announce(engine_off, others)
            announce(engine, chain(6, 1))  # behind it in time
            with engine_tier(cluster) as third:
                wait_until(lambda: ended(third, chain(6, 1))[1] is MatchEnd.PENDING)
            assert ended(engine, others)[1] is MatchEnd.NEVER_STORED


@pytest.mark.slow
def test_a_cache_server_that_is_killed_is_waited_for_no_longer(cluster: ValkeyCluster) -> None:
    hashes = chain(7, 8)
    with client_above(cluster) as other, cache_server(*cluster_flags(cluster)) as server:
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(connected(server))
            one.learn(hashes)
            stack.enter_context(one.reserve(hashes))
            wait_until(lambda: ended(other, hashes)[1] is MatchEnd.PENDING)
            server.kill()
            wait_until(lambda: ended(other, hashes)[1] is MatchEnd.NEVER_STORED)
        other.set(hashes, payloads(hashes))
        with engine_tier(cluster) as engine:
            wait_until(lambda: fetch_all(engine, hashes) == payloads(hashes))


ANNOUNCING = """
import sys, time
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain
from kvtier.tiers.cluster import open_cluster_tier

config = ClusterConfig(valkey=(sys.argv[1],), timeout_s=60.0, segment=int(sys.argv[2]))
tier = open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())
hashes = chain(int(sys.argv[3]), 4)
tier.learn(hashes)
tier.announce(hashes)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_engine_that_is_killed_or_hangs_is_waited_for_no_longer(cluster: ValkeyCluster, is_stopped: bool) -> None:
    hashes = chain(8 + is_stopped, 4)
    words = [f"tcp://{cluster.seeds[0]}", str(SEGMENT), str(8 + is_stopped)]
    process = subprocess.Popen([sys.executable, "-c", ANNOUNCING, *words])
    try:
        with engine_tier(cluster) as other:
            wait_until(lambda: ended(other, hashes)[1] is MatchEnd.PENDING)
            send_signal(process.pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
            wait_until(lambda: ended(other, hashes)[1] is MatchEnd.NEVER_STORED)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_client_that_dies_is_waited_for_no_longer(cluster: ValkeyCluster, tmp_path: Path) -> None:
    """Its server lives, and sees that it is gone."""
    script = tmp_path / "client.py"
    script.write_text(
        "import sys, time, kvtier\n"
        "from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain\n"
        "client = kvtier.connect(sys.argv[1], layout=LAYOUT, namespace=NAMESPACE, timeout_s=60.0)\n"
        "client.learn(chain(10, 4))\n"
        "kept = client.reserve(chain(10, 4))\n"
        "time.sleep(600)\n"
    )
    hashes = chain(10, 4)
    with cache_server(*cluster_flags(cluster)) as server, engine_tier(cluster) as other:
        process = subprocess.Popen([sys.executable, str(script), server.unix])
        try:
            wait_until(lambda: ended(other, hashes)[1] is MatchEnd.PENDING)
        finally:
            process.kill()
            process.wait()
        wait_until(lambda: ended(other, hashes)[1] is MatchEnd.NEVER_STORED)


@pytest.mark.slow
def test_announcements_of_many_threads_come_to_an_end(cluster: ValkeyCluster) -> None:
    (node,) = cluster.primaries
    with engine_tier(cluster) as one:

        def work(first: int) -> None:
            for seed in range(first, first + 20):
                hashes = chain(100 + seed, 6)
                announce(one, hashes)
                one.offer(hashes[:3], payloads(hashes[:3]))
                one.withdraw(hashes)

        threads = [threading.Thread(target=work, args=(20 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: cluster.call(node, b"DBSIZE") == 80 * 3)


def test_what_a_client_has_learned_and_stores_without_asking_goes_to_the_cluster(cluster: ValkeyCluster) -> None:
    hashes = chain(11, 6)
    with client_above(cluster) as one, engine_tier(cluster) as engine:
        one.learn(hashes)
        one.set(hashes, payloads(hashes))
        wait_until(lambda: fetch_all(engine, hashes) == payloads(hashes))
