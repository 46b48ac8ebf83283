"""A cluster that speaks TLS itself, with users: below engines, below cache servers, and while a primary is killed.

The server is Debian's Redis: `make test-cluster-tls` brings it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.blocks.match_end import MatchEnd
from kvtier.deploy.check.cluster import notes_on_cluster
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.creation import create_cluster
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, empty_buffers, fetch_all, payloads
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.cluster_load import Load
from tests.support.clustered_servers import SEGMENT, connected
from tests.support.tls_server import node_tls
from tests.support.valkey import NodeTls, ValkeyCluster, valkey_cluster, valkey_nodes
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

pytestmark = [pytest.mark.slow, needs_openssl]

USER = (
    "kvtier on >a-password ~kvt1:* -@all +get +set +pexpireat +exists +unlink +scan +hello +auth +client|setname "
    "+asking +cluster|slots +ping +config|get"
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> NodeTls:
    return node_tls(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(tls: NodeTls) -> Iterator[ValkeyCluster]:
    with valkey_cluster(3, 3, access=tls.access(), tls=tls) as running:
        for node in running.nodes:
            running.call(node, b"ACL", b"SETUSER", *(word.encode() for word in USER.split()))
        yield running


def config_of(cluster: ValkeyCluster, ca_file: str, password: str = "a-password") -> ClusterConfig:
    nodes = tuple(f"tls://{seed}" for seed in cluster.seeds)
    return ClusterConfig(
        valkey=nodes, ca_file=ca_file, user="kvtier", password=password, timeout_s=CALL_S, segment=SEGMENT
    )


@contextlib.contextmanager
def opened(config: ClusterConfig) -> Iterator[ClusterTier]:
    with contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as tier:
        yield tier


def test_blocks_come_back_through_tls_as_the_user_for_kvtier(cluster: ValkeyCluster, tls: NodeTls) -> None:
    hashes = chain(1, 24)
    with opened(config_of(cluster, tls.certificate)) as tier:
        assert tier.wait_until_known(CALL_S)
        assert tier.offer(hashes, payloads(hashes)) == 24
        assert fetch_all(tier, hashes) == payloads(hashes)
        tier.announce(hashes)
        assert tier.drop(hashes) == 24
    notes = list(notes_on_cluster(config_of(cluster, tls.certificate)))
    assert not any("answer" in note for note in notes), "kvtier check gets through, too"


@pytest.mark.parametrize("wrong", ["certificate", "password"])
def test_what_cannot_be_trusted_is_not_spoken_to_and_that_is_told(
    cluster: ValkeyCluster, tls: NodeTls, wrong: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hashes = chain(2, 8)
    ca_file = make_certificate(tmp_path, "other")[0] if wrong == "certificate" else tls.certificate
    config = config_of(cluster, ca_file, "not-the-password" if wrong == "password" else "a-password")
    told = "TLS with the cluster's node" if wrong == "certificate" else "refused to talk"
    with caplog.at_level(logging.WARNING), opened(config) as tier:
        wait_until(lambda: told in caplog.text)
        assert tier.match(hashes).ended is MatchEnd.TIER_DOWN
        assert tier.offer(hashes, payloads(hashes)) == 0


def test_a_cache_server_above_a_cluster_with_tls(cluster: ValkeyCluster, tls: NodeTls, tmp_path: Path) -> None:
    hashes = chain(3, 24)
    password = tmp_path / "password"
    password.write_text("a-password\n")
    nodes = ",".join(f"tls://{seed}" for seed in cluster.seeds)
    flags = ("--cluster", nodes, "--cluster-ca-file", tls.certificate, "--cluster-user", "kvtier")
    flags += ("--cluster-password-file", str(password), "--cluster-segment", str(SEGMENT))
    flags += ("--cluster-timeout", str(CALL_S))
    with (
        cache_server(*flags) as one,
        cache_server(*flags) as other,
        connected(one) as client,
        connected(other) as reader,
        opened(config_of(cluster, tls.certificate)) as tier,
    ):
        client.learn(hashes)
        client.set(hashes, payloads(hashes))
        wait_until(lambda: tier.contains(hashes) == [True] * 24)
        into = empty_buffers(24)
        assert reader.get(hashes, into) == 24
        assert [bytes(buffer) for buffer in into] == payloads(hashes)
        assert reader.stats()["cluster_losses"] == {}


def test_a_primary_is_killed_under_load_and_its_replica_takes_over(tls: NodeTls) -> None:
    with valkey_cluster(3, 3, access=tls.access(), tls=tls) as cluster:
        nodes = tuple(f"tls://{seed}" for seed in cluster.seeds)
        with opened(ClusterConfig(valkey=nodes, ca_file=tls.certificate, timeout_s=CALL_S, segment=SEGMENT)) as tier:
            assert tier.wait_until_known(CALL_S)
            with Load(tier) as load:
                load.wait_for_reads()
                cluster.primaries[1].kill()
                load.wait_for_reads()
            wait_until(lambda: all(count_found(tier, seed) == 4 for seed in range(200, 212)))


def count_found(tier: ClusterTier, seed: int) -> int:
    hashes = chain(seed, 4)
    tier.offer(hashes, payloads(hashes))
    return len(fetch_all(tier, hashes))


def test_new_servers_with_tls_are_joined_to_a_cluster(tls: NodeTls) -> None:
    with valkey_nodes(3, tls=tls) as nodes:
        create_cluster([node.address for node in nodes], tls.access(), LIMIT_S)
        cluster = ValkeyCluster(nodes, access=tls.access())
        wait_until(lambda: all("cluster_state:ok" in cluster.info(node) for node in nodes))
