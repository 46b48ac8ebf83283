"""A Valkey cluster below cache servers: what is stored through one of them is a hit for the clients of another.

What is dead, hung, empty or damaged of it costs what it had, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import urllib.request
from collections.abc import Iterator

import pytest

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.observe.metrics import TierMetrics
from kvtier.plugins.embedded_server import EmbeddedCluster, EmbeddedServer
from kvtier.stores.valkey.config import ClusterConfig, ClusterUse
from kvtier.stores.valkey.slots import slot_of
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, empty_buffers, payloads
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from kvtier.tiers.explaining import explain
from tests.support.clustered_servers import SEGMENT, client_above, cluster_flags, connected, num_stored
from tests.support.server_load import ServerLoad, got
from tests.support.valkey import ValkeyCluster, ValkeyNode, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ValkeyCluster) -> ValkeyCluster:
    """One node, and empty."""
    running.call(running.primaries[0], b"FLUSHALL", b"SYNC")
    return running


@contextlib.contextmanager
def other_host(cluster: ValkeyCluster) -> Iterator[ClusterTier]:
    """An engine on another host, right above the cluster."""
    nodes = tuple(f"tcp://{seed}" for seed in cluster.seeds)
    config = ClusterConfig(valkey=nodes, timeout_s=CALL_S, segment=SEGMENT)
    with contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as tier:
        assert tier.wait_until_known(CALL_S)
        yield tier


@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_another_host_has_stored_is_brought_into_memory_once(cluster: ValkeyCluster, tcp: bool) -> None:
    hashes = chain(1, NUM_BLOCKS)
    with other_host(cluster) as other, client_above(cluster, tcp=tcp) as client:
        other.offer(hashes[:20], payloads(hashes[:20]))

        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (0, 20, MatchEnd.NEVER_STORED)
        assert client.stats()["used_bytes"] == 0
        assert got(client, hashes) == payloads(hashes[:20])
        other.drop(hashes)
        assert got(client, hashes) == payloads(hashes[:20]), "it is in the server's memory now"
        stats = client.stats()
    assert stats["cluster_read_blocks"] == 20
    assert stats["cluster_losses"] == {}


def test_blocks_of_a_prompt_that_lie_in_memory_and_in_the_cluster_by_turns(cluster: ValkeyCluster) -> None:
    hashes = chain(2, NUM_BLOCKS)
    with other_host(cluster) as other, client_above(cluster) as client:
        other.offer(hashes, payloads(hashes))
        with client.match(hashes[:2]) as lease:
            assert lease.wait() == 2
        client.learn(hashes)
        with client.match(hashes[5:9]) as lease:
            assert lease.wait() == 4, "the client has said where they stand"
        with client.match_lazily(hashes) as lease:
            assert (lease.num_blocks, lease.num_stored, lease.ended) == (2, NUM_BLOCKS - 2, MatchEnd.ALL)
        assert got(client, hashes) == payloads(hashes)
        assert client.stats()["cluster_read_blocks"] == NUM_BLOCKS


@pytest.mark.slow
def test_a_part_that_nobody_has_placed_is_found_once_its_beginning_was_seen(cluster: ValkeyCluster) -> None:
    hashes = chain(3, NUM_BLOCKS)
    with other_host(cluster) as other, client_above(cluster) as client:
        other.offer(hashes, payloads(hashes))
        assert got(client, hashes[6:]) == []
        with client.match_lazily(hashes) as lease:
            assert lease.num_stored == NUM_BLOCKS
        assert got(client, hashes[6:]) == payloads(hashes[6:])


@pytest.mark.slow
def test_a_block_that_is_gone_when_it_is_read_ends_the_lease(cluster: ValkeyCluster) -> None:
    hashes = chain(4, NUM_BLOCKS)
    (node,) = cluster.primaries
    with other_host(cluster) as other, client_above(cluster) as client:
        other.offer(hashes, payloads(hashes))
        keys, _ = other.keys_of(hashes)
        damaged = cluster.call(node, b"GET", keys[1])
        cluster.call(node, b"SET", keys[9], damaged, b"PX", b"100000")

        with client.match(hashes) as lease:
            into = empty_buffers(NUM_BLOCKS)
            assert lease.num_blocks == NUM_BLOCKS
            assert lease.fetch(into) == 9
            assert lease.ended is MatchEnd.LOST
        assert [bytes(buffer) for buffer in into[:9]] == payloads(hashes[:9])
        losses = client.stats()["cluster_losses"]
        assert losses == {"corrupt": 1, "lost": 1}
        assert got(client, hashes) == payloads(hashes[:9]), "what was damaged is deleted"
        assert client.set(hashes, payloads(hashes)) >= 1
        assert got(client, hashes) == payloads(hashes)


@pytest.mark.slow
def test_a_prompt_longer_than_the_memory_is_told_and_passes_through_it(cluster: ValkeyCluster) -> None:
    hashes = chain(5, NUM_BLOCKS)
    with other_host(cluster) as other, client_above(cluster, memory=str(10 * LAYOUT.slot_bytes)) as client:
        other.offer(hashes, payloads(hashes))
        client.learn(hashes)
        with client.match(hashes) as lease:
            assert (lease.num_blocks, lease.ended) == (5, MatchEnd.LIMIT)  # half of it is one client's
        for first in range(0, NUM_BLOCKS, 4):
            assert got(client, hashes[first : first + 4]) == payloads(hashes[first : first + 4])


def test_a_hung_cluster_costs_a_moment_and_then_nothing_and_is_used_again(cluster: ValkeyCluster) -> None:
    hashes = chain(6, NUM_BLOCKS)
    (node,) = cluster.primaries
    with other_host(cluster) as other, client_above(cluster, timeout_s=0.3) as client:
        other.offer(hashes, payloads(hashes))
        own = chain(7, 4)
        client.set(own, payloads(own))
        node.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: client.match(hashes).ended is MatchEnd.TIER_DOWN)
            num_timeouts = client.stats()["cluster_losses"]
            for _ in range(20):
                assert client.match(hashes).ended is MatchEnd.TIER_DOWN
            assert got(client, own) == payloads(own)
            assert client.stats()["cluster_losses"]["timeout"] == num_timeouts["timeout"]  # type: ignore[index]
        finally:
            node.send_signal(signal.SIGCONT)
        wait_until(lambda: got(client, hashes) == payloads(hashes))


def store(client: CacheClient, hashes: list[BlockHash]) -> None:
    """Behave like an engine: match first, and compute the missing blocks."""
    with client.match(hashes) as lease:
        num_found = lease.wait()
    client.set(hashes[num_found:], payloads(hashes[num_found:]))


def losses(client: CacheClient) -> dict[str, int]:
    found = client.stats()["cluster_losses"]
    assert isinstance(found, dict)
    return found


def test_what_a_client_of_one_server_has_stored_is_a_hit_for_a_client_of_another(cluster: ValkeyCluster) -> None:
    hashes = chain(10, NUM_BLOCKS)
    longer = [*hashes, *chain(11, 6)]
    with client_above(cluster) as one, client_above(cluster) as other:
        store(one, hashes)
        wait_until(lambda: num_stored(cluster) == NUM_BLOCKS)
        assert got(other, hashes) == payloads(hashes)
        other.learn(longer)
        assert other.set(longer[NUM_BLOCKS:], payloads(longer[NUM_BLOCKS:])) == 6, "what follows, as it is computed"
        wait_until(lambda: num_stored(cluster) == NUM_BLOCKS + 6)
        assert got(one, longer) == payloads(longer)
        assert one.stats()["cluster_written_blocks"] == NUM_BLOCKS
        assert other.stats()["cluster_written_blocks"] == 6
        assert losses(one) == losses(other) == {}
        assert one.drop(hashes[20:]) == 4
        assert num_stored(cluster) == NUM_BLOCKS + 2


def test_with_reuse_what_is_used_again_goes_to_the_cluster_and_nothing_else(cluster: ValkeyCluster) -> None:
    used, unused = chain(12, 8), chain(13, 8)
    with client_above(cluster, "--cluster-store-on", "reuse") as client:
        store(client, used)
        store(client, unused)
        assert num_stored(cluster) == 0
        assert got(client, used[:5]) == payloads(used[:5])
        wait_until(lambda: num_stored(cluster) == 5)
        with other_host(cluster) as other:
            assert other.contains([*used, *unused]) == [True] * 5 + [False] * 11


@pytest.mark.slow
def test_with_reuse_what_memory_is_about_to_lose_goes_to_the_cluster(cluster: ValkeyCluster) -> None:
    memory = str(32 * LAYOUT.slot_bytes)
    with client_above(cluster, "--cluster-store-on", "reuse", memory=memory) as client:
        hashes = chain(14, 16)
        store(client, hashes)
        for seed in range(15, 19):
            store(client, chain(seed, 3))
        assert client.stats()["evicted_blocks"] == 0
        store(client, chain(19, 3))
        wait_until(lambda: num_stored(cluster) >= 16)
        for seed in range(20, 30):
            store(client, chain(seed, 3))
        assert got(client, hashes) == payloads(hashes), "from the cluster, as far as memory has lost it"


@pytest.mark.slow
def test_a_rate_holds_back_what_is_written_and_no_client(cluster: ValkeyCluster) -> None:
    rate = ("--cluster-write-rate", "256")
    hashes = chain(30, NUM_BLOCKS)
    with client_above(cluster, *rate) as client:
        for first in range(0, NUM_BLOCKS, 2):
            store(client, hashes[: first + 2])
        assert got(client, hashes) == payloads(hashes)
        wait_until(lambda: num_stored(cluster) > 0)
        assert num_stored(cluster) < NUM_BLOCKS, "many minutes' worth"


@pytest.mark.slow
def test_a_cluster_without_room_takes_nothing_more_and_that_is_counted(cluster: ValkeyCluster) -> None:
    (node,) = cluster.primaries
    with client_above(cluster) as client:
        kept = chain(40, SEGMENT)
        store(client, kept)
        wait_until(lambda: num_stored(cluster) == SEGMENT)
        cluster.call(node, b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"%d" % cluster.used_bytes(node))
        try:
            for seed in range(41, 61):
                store(client, chain(seed, SEGMENT))
            wait_until(lambda: losses(client).get("full", 0) > 0)
            assert got(client, chain(60, SEGMENT)) == payloads(chain(60, SEGMENT))
            wait_until(lambda: losses(client).get("not written", 0) >= losses(client)["full"])
        finally:
            cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"0")
            cluster.call(node, b"CONFIG", b"SET", b"maxmemory-policy", b"volatile-ttl")
        with other_host(cluster) as other:
            assert other.contains(kept) == [True] * SEGMENT


@pytest.mark.slow
def test_the_metrics_and_the_description_of_a_server_name_its_cluster(cluster: ValkeyCluster) -> None:
    hashes = chain(70, 6)
    with cache_server(*cluster_flags(cluster), "--metrics", "127.0.0.1:0") as server, connected(server) as client:
        store(client, hashes)
        wait_until(lambda: num_stored(cluster) == 6)
        wait_until(lambda: client.stats()["cluster_queued_bytes"] == 0)
        text = urllib.request.urlopen(server.metrics, timeout=CALL_S).read().decode()
        described = client.info()["cluster"]
    assert described == [f"tcp://{cluster.seeds[0]}"]
    assert "kvtier_server_cluster_written_blocks 6.0" in text
    assert "kvtier_server_cluster_nodes_up 1.0" in text
    assert "# TYPE kvtier_server_cluster_losses_total counter" in text


@pytest.mark.slow
def test_a_server_that_is_started_on_demand_sits_above_the_cluster_that_it_is_told(cluster: ValkeyCluster) -> None:
    hashes = chain(80, 6)
    nodes = tuple(f"tcp://{seed}" for seed in cluster.seeds)
    config = ClusterConfig(valkey=nodes, segment=SEGMENT, timeout_s=CALL_S)
    below = EmbeddedCluster(cluster_flags(cluster), ClusterUse.of(config, "commit", None))
    server = EmbeddedServer(8 << 20, cluster=below, unused_s=1.0)
    with other_host(cluster) as other, contextlib.closing(server):
        other.offer(hashes, payloads(hashes))
        server.ensure()
        with kvtier.connect(server.address, layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S) as client:
            wait_until(lambda: got(client, hashes) == payloads(hashes))
            assert client.info()["cluster"] == list(nodes)


@pytest.mark.slow
def test_a_primary_is_killed_during_loads_and_stores_and_comes_back_empty() -> None:
    """No wrong byte and no error; what the dead node had is computed, and shared again."""
    with valkey_cluster(3) as cluster, client_above(cluster) as one, client_above(cluster) as other:
        victim = cluster.primaries[1]
        with ServerLoad([one, other], store) as load:
            load.wait_for_stores()
            victim.kill()
            load.wait_for_stores()
            victim.start()
            load.wait_for_stores()
        wait_until(lambda: one.stats()["cluster_nodes_up"] == 3)
        wait_until(lambda: other.stats()["cluster_nodes_up"] == 3)
        seeds = [seed for seed in range(5000, 5100) if owner(cluster, chain(seed, 1)[0]) is victim][:3]
        for seed in seeds:
            wait_until(functools.partial(shared, one, other, chain(seed, 4)))


def owner(cluster: ValkeyCluster, head: BlockHash) -> ValkeyNode:
    return cluster.owner_of(slot_of(f"{NAMESPACE.hex()}:{head.hex()}".encode()))


def shared(one: CacheClient, other: CacheClient, hashes: list[BlockHash]) -> bool:
    store(one, hashes)
    return got(other, hashes) == payloads(hashes)


def test_explain_says_what_of_a_prompt_lies_in_the_cluster_and_uses_nothing(cluster: ValkeyCluster) -> None:
    fields = NamespaceFields(layout=LAYOUT, weights="w", model_config={"layers": 1})
    tokens = list(range(10 * LAYOUT.block_tokens))
    with cache_server(*cluster_flags(cluster)) as one, cache_server(*cluster_flags(cluster)) as other:
        with kvtier.connect(one.unix, layout=LAYOUT, namespace=fields, timeout_s=CALL_S) as client:
            hashes = client.hashes(tokens)
            client.learn(hashes)
            client.set(hashes, payloads(hashes))
            wait_until(lambda: num_stored(cluster) == 10)
            assert client.look(client.hashes(range(16, 32))) == [0], "requests do not wait for the cluster here"
        with kvtier.connect(other.unix, timeout_s=CALL_S) as client:
            found = explain(client, fields, [*tokens, *tokens])
            assert client.stats()["cluster_found_blocks"] == 0
    assert found.cached_tokens == {"memory": 0, "disk": 0, "cluster": len(tokens)}
    assert (found.reason, found.ended_at_tokens) == (MatchEnd.NEVER_STORED, len(tokens))


def test_a_server_drops_what_others_have_stored_in_the_cluster(cluster: ValkeyCluster) -> None:
    """It has never seen the prompt, nor does it take what it drops for the places of blocks."""
    hashes, other_prompt = chain(90, 22), chain(91, 8)
    with other_host(cluster) as other, client_above(cluster) as client:
        other.offer(hashes, payloads(hashes))
        other.offer(other_prompt, payloads(other_prompt))
        assert client.drop([*hashes, *other_prompt[:1]]) == 22
        assert num_stored(cluster) == len(other_prompt)
        assert got(client, other_prompt) == payloads(other_prompt)
