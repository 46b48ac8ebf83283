"""What may happen to a cluster below a cache server: lies, a wrong password, full memory, slots that move, all at once.

Clients of the server get right bytes or a miss, never an error.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import CacheClient
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.slots import NUM_SLOTS
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, payloads
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from tests.support.clustered_servers import SEGMENT, client_above, cluster_flags, connected
from tests.support.resp_proxy import Lie, LyingNode
from tests.support.server_load import ServerLoad, got
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

pytestmark = pytest.mark.slow  # each starts a cluster

NUM_BLOCKS = 24


def store(client: CacheClient, hashes: list[BlockHash]) -> None:
    client.learn(hashes)
    client.set(hashes, payloads(hashes))


@contextlib.contextmanager
def other_host(cluster: ValkeyCluster) -> Iterator[ClusterTier]:
    nodes = tuple(f"tcp://{seed}" for seed in cluster.seeds)
    config = ClusterConfig(valkey=nodes, timeout_s=CALL_S, segment=SEGMENT)
    with contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as tier:
        assert tier.wait_until_known(CALL_S)
        yield tier


# --- lies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def liar() -> Iterator[LyingNode]:
    with contextlib.closing(LyingNode()) as node:
        yield node


@pytest.fixture
def cluster(liar: LyingNode) -> Iterator[ValkeyCluster]:
    """One node, which every client reaches through the liar."""
    with valkey_cluster(1, 0, "--cluster-announce-port", str(liar.port)) as running:
        liar.target = running.primaries[0].port
        yield running


def flipped(reply: bytes) -> bytes:
    return reply[:5000] + bytes([reply[5000] ^ 1]) + reply[5001:]


def of_another_size(reply: bytes) -> bytes:
    return b"$3\r\nabc\r\n"


def of_a_huge_size(reply: bytes) -> bytes:
    return b"$99999999999999\r\n" + reply[20:]


def garbage(reply: bytes) -> bytes:
    return random.Random(len(reply)).randbytes(len(reply))


def nothing_of_it(reply: bytes) -> bytes:
    return b"-ERR I do not feel like it\r\n"


def a_number(reply: bytes) -> bytes:
    return b":7\r\n"


def nested(reply: bytes) -> bytes:
    return b"*1\r\n" * 1000 + b":1\r\n"


def cut_short(reply: bytes) -> None:
    return None


LIES = [flipped, of_another_size, of_a_huge_size, garbage, nothing_of_it, a_number, nested, cut_short]


@pytest.mark.parametrize("lie", [*LIES, "swapped"], ids=lambda lie: getattr(lie, "__name__", lie))
def test_a_lying_node_costs_hits_and_nothing_else(cluster: ValkeyCluster, liar: LyingNode, lie: Lie | str) -> None:
    hashes, own = chain(1, NUM_BLOCKS), chain(2, 8)
    with other_host(cluster) as other, client_above(cluster) as client:
        other.offer(hashes, payloads(hashes))
        store(client, own)
        wait_until(lambda: other.contains(own) == [True] * 8)
        if isinstance(lie, str):
            liar.swaps = True
        else:
            liar.lie = lie
        found = got(client, hashes)
        assert found == payloads(hashes)[: len(found)], "no wrong byte"
        assert len(found) < NUM_BLOCKS
        assert liar.num_lies > 0
        assert got(client, own) == payloads(own), "what the server has itself"
        liar.heal()
        wait_until(lambda: restored(other, client, hashes))
        assert client.stats()["cluster_losses"]


def restored(other: ClusterTier, client: CacheClient, hashes: list[BlockHash]) -> bool:
    """A block damaged on its way counts as damaged, is deleted, and is stored again."""
    other.offer(hashes, payloads(hashes))
    return got(client, hashes) == payloads(hashes)


# --- rights, room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_right", [False, True])
def test_a_wrong_password_costs_hits_and_a_sentence_and_is_mended_in_the_cluster(
    tmp_path: Path, was_right: bool
) -> None:
    """The password is wrong from the start, or after a change."""
    hashes, own = chain(1, NUM_BLOCKS), chain(2, 8)
    password = tmp_path / "password"
    password.write_text("right\n")
    with valkey_cluster(1) as cluster:
        (node,) = cluster.primaries
        cluster.call(node, b"ACL", b"SETUSER", b"kvtier", b"on", b"~kvt1:*", b"+@all", b">other")
        if was_right:
            cluster.call(node, b"ACL", b"SETUSER", b"kvtier", b">right")
        flags = (*cluster_flags(cluster), "--cluster-user", "kvtier", "--cluster-password-file", str(password))
        with cache_server(*flags) as server, connected(server) as client, other_host(cluster) as other:
            other.offer(hashes, payloads(hashes))
            if was_right:
                assert got(client, hashes[:4]) == payloads(hashes[:4])
                cluster.call(node, b"ACL", b"SETUSER", b"kvtier", b"<right")
                cluster.call(node, b"CLIENT", b"KILL", b"USER", b"kvtier")
            wait_until(lambda: client.match_lazily(hashes[4:]).ended is MatchEnd.TIER_DOWN)
            store(client, own)
            assert got(client, own) == payloads(own)
            cluster.call(node, b"ACL", b"SETUSER", b"kvtier", b">right")
            wait_until(lambda: got(client, hashes) == payloads(hashes))


def test_full_memory_under_load_costs_stores_and_no_hit() -> None:
    with valkey_cluster(2) as cluster, client_above(cluster) as one, client_above(cluster) as other:
        with ServerLoad([one, other], store) as load:
            load.wait_for_stores()
            for node in cluster.primaries:
                cluster.call(node, b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
                cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"%d" % cluster.used_bytes(node))
            wait_until(lambda: losses(one).get("full", 0) + losses(other).get("full", 0) > 0)
            load.wait_for_stores()
            for node in cluster.primaries:
                cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"0")
            load.wait_for_stores()
        kept = chain(1, NUM_BLOCKS)
        wait_until(lambda: shared(one, other, kept))


def losses(client: CacheClient) -> dict[str, int]:
    found = client.stats()["cluster_losses"]
    assert isinstance(found, dict)
    return found


def shared(one: CacheClient, other: CacheClient, hashes: list[BlockHash]) -> bool:
    """A block stored by one server is a hit on the other."""
    store(one, hashes)
    got(one, hashes)  # used again: what could not be written before is tried again
    return got(other, hashes) == payloads(hashes)


# --- slots that move -----------------------------------------------------------------------------------------------


def test_slots_move_under_load_from_node_to_node_and_back() -> None:
    with valkey_cluster(2) as cluster, client_above(cluster) as one, client_above(cluster) as other:
        first, second = cluster.primaries
        with ServerLoad([one, other], store) as load:
            load.wait_for_stores()
            slots = range(0, NUM_SLOTS // 2, 1024)
            for source, target in ((first, second), (second, first)):
                for slot in slots:
                    cluster.move_slot(source, target, slot)
                load.wait_for_stores()
        kept = chain(1, NUM_BLOCKS)
        wait_until(lambda: shared(one, other, kept))
