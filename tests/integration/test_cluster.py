"""A Valkey cluster that is killed, hung, resharded, damaged, full or refuses: what is lost is a miss, no error."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import CapacityError, TierError
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.node import NodeAccess
from kvtier.stores.valkey.slots import slot_of
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, fetch_all, payload, payloads
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.cluster_load import Load
from tests.support.valkey import TlsFront, ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

pytestmark = pytest.mark.slow  # each starts a cluster

SEGMENT = 4
NUM_BLOCKS = 24


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(3) as running:
        yield running


@contextlib.contextmanager
def opened(cluster: ValkeyCluster, metrics: TierMetrics | None = None, **settings: object) -> Iterator[ClusterTier]:
    values: dict[str, object] = {"timeout_s": CALL_S, "segment": SEGMENT, **settings}
    config = ClusterConfig(valkey=tuple(f"tcp://{seed}" for seed in cluster.seeds), **values)  # type: ignore[arg-type]
    with contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, metrics or TierMetrics())) as tier:
        yield tier


def known(tier: ClusterTier) -> ClusterTier:
    assert tier.wait_until_known(CALL_S)
    return tier


def tag_of(head: BlockHash) -> bytes:
    return f"{NAMESPACE.hex()}:{head.hex()}".encode()


def key_of(hashes: Sequence[BlockHash], position: int) -> bytes:
    head = hashes[position // SEGMENT * SEGMENT]
    return b"kvt1:{%b}:%b" % (tag_of(head), hashes[position].hex().encode())


def count_found(tier: ClusterTier, hashes: list[BlockHash]) -> int:
    with tier.match(hashes) as lease:
        return lease.num_blocks


def test_what_one_host_has_stored_is_a_hit_on_another(cluster: ValkeyCluster) -> None:
    hashes = chain(1, NUM_BLOCKS)
    with opened(cluster) as one, opened(cluster) as other:
        assert known(one).offer(hashes[:10], payloads(hashes[:10])) == 10
        one.learn(hashes)
        assert one.offer(hashes[10:], payloads(hashes[10:])) == NUM_BLOCKS - 10
        known(other).learn(hashes)

        assert fetch_all(other, hashes) == payloads(hashes)
        assert fetch_all(other, hashes[7:]) == payloads(hashes[7:])
        assert other.offer(hashes, payloads(hashes)) == 0
    owners = {cluster.owner_of(slot_of(tag_of(hashes[first]))).port for first in range(0, NUM_BLOCKS, SEGMENT)}
    assert len(owners) > 1, "segments are spread over the nodes"


def test_every_key_has_a_time_to_live_and_the_end_of_a_prompt_goes_first(cluster: ValkeyCluster) -> None:
    hashes = chain(1, SEGMENT)
    node = cluster.owner_of(slot_of(tag_of(hashes[0])))
    with opened(cluster, ttl_s=1000.0) as tier:
        known(tier).offer(hashes, payloads(hashes))
        times = [cluster.call(node, b"PEXPIRETIME", key_of(hashes, position)) for position in range(SEGMENT)]
        assert times == sorted(times, key=lambda at: -int(at))  # type: ignore[arg-type]
        assert len(set(map(str, times))) == SEGMENT
        tier.match(hashes).release()
        later = [cluster.call(node, b"PEXPIRETIME", key_of(hashes, position)) for position in range(SEGMENT)]

    assert all(after >= before > 0 for after, before in zip(later, times, strict=True))  # type: ignore[operator]


def test_a_prompt_that_is_stored_in_parts_still_loses_its_end_first(cluster: ValkeyCluster) -> None:
    hashes = chain(2, SEGMENT)
    node = cluster.owner_of(slot_of(tag_of(hashes[0])))
    with opened(cluster) as tier:
        known(tier).learn(hashes)
        for first in range(0, SEGMENT, 4):
            stored_at = time.time()
            tier.offer(hashes[first : first + 4], payloads(hashes[first : first + 4]))
            wait_until(lambda at=stored_at: time.time() > at + SEGMENT / 1000)  # longer than places count
        times = [cluster.call(node, b"PEXPIRETIME", key_of(hashes, position)) for position in range(SEGMENT)]

    assert times == sorted(times, key=lambda at: -int(at))  # type: ignore[arg-type]


def test_a_dead_node_costs_its_own_blocks_and_is_used_again_when_it_is_back(cluster: ValkeyCluster) -> None:
    prompts = [chain(seed, SEGMENT) for seed in range(12)]
    owners = [cluster.owner_of(slot_of(tag_of(hashes[0]))) for hashes in prompts]
    victim = owners[0]
    with opened(cluster) as tier:
        for hashes in prompts:
            known(tier).offer(hashes, payloads(hashes))
        victim.kill()

        for _ in range(2):
            for hashes, owner in zip(prompts, owners, strict=True):
                with tier.match(hashes) as lease:
                    expected = (0, MatchEnd.TIER_DOWN) if owner is victim else (SEGMENT, MatchEnd.ALL)
                    assert (lease.num_blocks, lease.ended) == expected
        assert tier.offer(prompts[0], payloads(prompts[0])) == 0
        victim.start()
        wait_until(lambda: tier.offer(prompts[0], payloads(prompts[0])) == SEGMENT)
        assert fetch_all(tier, prompts[0]) == payloads(prompts[0])


def test_a_hung_node_costs_one_deadline_and_comes_back(cluster: ValkeyCluster) -> None:
    hashes = chain(1, SEGMENT)
    node = cluster.owner_of(slot_of(tag_of(hashes[0])))
    metrics = TierMetrics()
    with opened(cluster) as patient, opened(cluster, metrics, timeout_s=0.5) as tier:
        known(patient).offer(hashes, payloads(hashes))
        assert known(tier)
        wait_until(lambda: count_found(tier, hashes) == SEGMENT)  # a busy machine may be late once
        lease = tier.match(hashes)
        node.send_signal(signal.SIGSTOP)
        try:
            assert lease.fetch([bytearray(LAYOUT.block_bytes) for _ in hashes]) == 0
            lease.release()
            with tier.match(hashes) as lease:
                assert lease.ended is MatchEnd.TIER_DOWN
        finally:
            node.send_signal(signal.SIGCONT)
        wait_until(lambda: count_found(tier, hashes) == SEGMENT)
        assert fetch_all(patient, hashes) == payloads(hashes)
    assert metrics.value(metrics.failures, tier="cluster", kind="timeout") >= 1


def test_a_primary_killed_under_load_is_replaced_by_its_replica() -> None:
    with valkey_cluster(3, 3) as cluster, opened(cluster, timeout_s=5.0) as tier, Load(known(tier)) as load:
        load.wait_for_reads()
        victim = cluster.primaries[1]
        victim.kill()
        load.wait_for_reads()
        hashes = next(
            chain(seed, SEGMENT)
            for seed in range(1000, 2000)
            if cluster.owner_of(slot_of(tag_of(chain(seed, SEGMENT)[0]))) is victim
        )
        wait_until(lambda: tier.offer(hashes, payloads(hashes)) == SEGMENT)  # by who was its replica
        assert fetch_all(tier, hashes) == payloads(hashes)
        load.wait_for_reads()


def test_slots_move_under_load(cluster: ValkeyCluster) -> None:
    """Reads and writes follow, block by block."""
    hashes = chain(5000, SEGMENT)
    slot = slot_of(tag_of(hashes[0]))
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.primaries if node is not source)
    source_id, target_id = cluster.call(source, b"CLUSTER", b"MYID"), cluster.call(target, b"CLUSTER", b"MYID")
    number = b"%d" % slot
    with opened(cluster) as tier, Load(known(tier)) as load:
        tier.offer(hashes, payloads(hashes))
        cluster.call(target, b"CLUSTER", b"SETSLOT", number, b"IMPORTING", source_id)
        cluster.call(source, b"CLUSTER", b"SETSLOT", number, b"MIGRATING", target_id)
        assert fetch_all(tier, hashes) == payloads(hashes)
        for position in (0, 2):
            port = b"%d" % target.port
            cluster.call(source, b"MIGRATE", b"127.0.0.1", port, key_of(hashes, position), b"0", b"60000")
            assert fetch_all(tier, hashes) == payloads(hashes), "some blocks are here, and some there"
        fork = [*hashes[:2], chain(6000, 1)[0]]
        assert tier.offer(fork, payloads(fork)) == 1, "what is new goes to the new owner"
        assert cluster.call(target, b"CLUSTER", b"COUNTKEYSINSLOT", number) == 3
        for key in (key_of(hashes, 1), key_of(hashes, 3)):
            cluster.call(source, b"MIGRATE", b"127.0.0.1", b"%d" % target.port, key, b"0", b"60000")
        for node in (target, source):
            cluster.call(node, b"CLUSTER", b"SETSLOT", number, b"NODE", target_id)
        assert fetch_all(tier, hashes) == payloads(hashes), "it has moved"
        load.wait_for_reads()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "of another block", "of another program", "empty"])
def test_a_damaged_block_is_a_miss_and_is_deleted(cluster: ValkeyCluster, damage: str) -> None:
    hashes = chain(1, SEGMENT)
    node = cluster.owner_of(slot_of(tag_of(hashes[0])))
    metrics = TierMetrics()
    with opened(cluster, metrics) as tier:
        known(tier).offer(hashes, payloads(hashes))
        key = key_of(hashes, 2)
        value = cluster.call(node, b"GET", key_of(hashes, 1) if damage == "of another block" else key)
        assert isinstance(value, bytes)
        wrong = {
            "flipped": value[:5000] + bytes([value[5000] ^ 1]) + value[5001:],
            "truncated": value[:-1],
            "of another block": value,
            "of another program": b"x" * len(value),
            "empty": b"",
        }[damage]
        cluster.call(node, b"SET", key, wrong, b"PX", b"100000")

        with tier.match(hashes) as lease:
            into = [bytearray(b"\xa5" * LAYOUT.block_bytes) for _ in hashes]
            assert (lease.num_blocks, lease.fetch(into)) == (4, 2)
        assert [bytes(buffer) for buffer in into[:2]] == payloads(hashes[:2])
        assert bytes(into[3]) in (payload(hashes[3]), b"\xa5" * LAYOUT.block_bytes)
        assert tier.contains(hashes) == [True, True, False, True]
        assert tier.offer(hashes, payloads(hashes)) == 1
        assert fetch_all(tier, hashes) == payloads(hashes)
    assert metrics.value(metrics.failures, tier="cluster", kind="corrupt") == 1


def test_a_full_cluster_that_evicts_nothing_takes_nothing(cluster: ValkeyCluster) -> None:
    with opened(cluster) as tier:
        kept = chain(1, SEGMENT)
        known(tier).offer(kept, payloads(kept))
        for node in cluster.primaries:
            cluster.call(node, b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
            cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"%d" % cluster.used_bytes(node))

        def fill() -> None:
            for seed in range(100, 400):
                tier.offer(chain(seed, 1), payloads(chain(seed, 1)))

        with pytest.raises(CapacityError, match="the cluster's memory is full"):
            fill()
        assert fetch_all(tier, kept) == payloads(kept)


RIGHTS = (
    *(b"~kvt1:*", b"-@all", b"+get", b"+set", b"+pexpireat", b"+exists", b"+unlink", b"+scan"),
    *(b"+hello", b"+auth", b"+client|setname", b"+asking", b"+cluster|slots", b"+ping"),
)


def test_a_user_of_its_own_is_enough_and_a_wrong_password_is_one_sentence(
    cluster: ValkeyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    for node in cluster.primaries:
        cluster.call(node, b"ACL", b"SETUSER", b"kvtier", b"on", b">the right one", *RIGHTS)
        cluster.call(node, b"ACL", b"SETUSER", b"default", b"on", b">an operator", b"resetpass", b">an operator")
    cluster.access = NodeAccess("default", "an operator")
    hashes = chain(1, NUM_BLOCKS)
    with opened(cluster, user="kvtier", password="the right one") as tier:
        assert known(tier).offer(hashes, payloads(hashes)) == NUM_BLOCKS
        assert fetch_all(tier, hashes) == payloads(hashes)
        assert tier.drop(hashes[20:]) == 4
        assert tier.drop() == 20
        tier.offer(hashes, payloads(hashes))
    with (
        caplog.at_level(logging.WARNING),
        opened(cluster, user="kvtier", password="a wrong one", timeout_s=0.2) as tier,
    ):
        wait_until(lambda: "WRONGPASS" in caplog.text)
        with tier.match(hashes) as lease:
            assert lease.ended is MatchEnd.TIER_DOWN
        assert tier.offer(hashes, payloads(hashes)) == 0
    assert "a wrong one" not in caplog.text


def test_a_cluster_that_is_not_there_is_used_once_it_is() -> None:
    hashes = chain(1, SEGMENT)
    with valkey_cluster(1) as cluster:
        (node,) = cluster.primaries
        node.kill()
        with opened(cluster, timeout_s=0.2) as tier:
            assert tier.match(hashes).ended is MatchEnd.TIER_DOWN
            assert tier.offer(hashes, payloads(hashes)) == 0
            node.start()
            wait_until(lambda: tier.offer(hashes, payloads(hashes)) == SEGMENT or count_found(tier, hashes) == SEGMENT)
            wait_until(lambda: count_found(tier, hashes) == SEGMENT)


@needs_openssl
def test_tls_to_every_node_and_none_that_another_has_signed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The node tells where its TLS is, and is spoken to there alone."""
    certificate, key = make_certificate(tmp_path, "node")
    other, _ = make_certificate(tmp_path, "other")
    hashes = chain(1, NUM_BLOCKS)
    with contextlib.closing(TlsFront(certificate, key)) as front:
        with valkey_cluster(1, 0, "--cluster-announce-port", str(front.port)) as cluster:
            front.target = cluster.primaries[0].port
            node = (f"tls://127.0.0.1:{front.port}",)
            config = ClusterConfig(valkey=node, ca_file=certificate, timeout_s=CALL_S, segment=SEGMENT)
            with contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, TierMetrics())) as tier:
                assert known(tier).offer(hashes, payloads(hashes)) == NUM_BLOCKS
                assert fetch_all(tier, hashes) == payloads(hashes)
            distrustful = ClusterConfig(valkey=node, ca_file=other, timeout_s=CALL_S, segment=SEGMENT)
            with (
                caplog.at_level(logging.WARNING),
                contextlib.closing(open_cluster_tier(distrustful, LAYOUT, NAMESPACE, TierMetrics())) as tier,
            ):
                wait_until(lambda: "TLS with the cluster's node" in caplog.text)
                assert tier.match(hashes).ended is MatchEnd.TIER_DOWN


def test_a_dead_node_keeps_no_other_from_dropping_its_blocks(cluster: ValkeyCluster) -> None:
    with opened(cluster) as tier:
        known(tier)
        for seed in range(60):
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
        cluster.primaries[0].kill()
        with pytest.raises(TierError):
            tier.drop()
        left = [cluster.call(node, b"DBSIZE") for node in cluster.primaries[1:]]
    assert left == [0, 0]
