"""Which namespace of another host has a prompt: told by a cluster, above a cache server and without one.

Whatever is written there in place of a description is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvtier
from kvtier import KvLayout, NamespaceFields
from kvtier.blocks.hashing import block_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey import described
from kvtier.stores.valkey.config import ClusterConfig, open_cluster
from kvtier.stores.valkey.described import MAX_LISTED, DescribedNamespaces
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.cluster import ClusterTier, open_cluster_tier
from kvtier.tiers.cluster_explaining import AskedCluster
from kvtier.tiers.explaining import explain, explain_request, look_again
from kvtier.tiers.explanation import Explanation, MatchEnd
from tests.support.clustered_servers import SEGMENT, cluster_flags, num_stored
from tests.support.tiered_engines import open_engine, settled
from tests.support.valkey import ValkeyCluster, ValkeyNode, valkey_cluster
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
TOKENS = list(range(16 * 9 + 3))
NUM_BLOCKS = 9
LIST = b"kvt1:{namespaces}"


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyCluster]:
    with valkey_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ValkeyCluster) -> ValkeyCluster:
    for node in running.primaries:
        running.call(node, b"FLUSHALL", b"SYNC")
    return running


def fields(**changes: object) -> NamespaceFields:
    return NamespaceFields(**({"layout": LAYOUT, "weights": "w", "salt": "ours"} | changes))  # type: ignore[arg-type]


def config_of(cluster: ValkeyCluster) -> ClusterConfig:
    return ClusterConfig(valkey=tuple(f"tcp://{seed}" for seed in cluster.seeds), timeout_s=CALL_S, segment=SEGMENT)


@contextlib.contextmanager
def engine_on_a_host(
    cluster: ValkeyCluster, namespace: NamespaceFields, model: str = "theirs"
) -> Iterator[ClusterTier]:
    """Right above the cluster."""
    opened = open_cluster_tier(config_of(cluster), LAYOUT, namespace, TierMetrics(), model=model)
    with contextlib.closing(opened) as tier:
        assert tier.wait_until_known(CALL_S)
        yield tier


def store(tier: ClusterTier, namespace: NamespaceFields, tokens: Sequence[int] = TOKENS) -> None:
    hashes = block_hashes(namespace.digest(), tokens, LAYOUT.block_tokens)
    assert tier.offer(hashes, [bytes(LAYOUT.block_bytes)] * len(hashes)) == len(hashes)


@contextlib.contextmanager
def server_on_a_host(cluster: ValkeyCluster, *options: str) -> Iterator[ServerProcess]:
    with cache_server(*cluster_flags(cluster), *options, memory="64MiB") as server:
        yield server


def client_of(server: ServerProcess, namespace: NamespaceFields, name: str = "ours") -> CacheClient:
    return kvtier.connect(server.unix, layout=LAYOUT, namespace=namespace, name=name, timeout_s=CALL_S)


@contextlib.contextmanager
def asked(cluster: ValkeyCluster) -> Iterator[AskedCluster]:
    config = config_of(cluster)
    with contextlib.closing(open_cluster(config)) as opened:
        assert opened.wait_until_known(CALL_S)
        yield AskedCluster(opened, config)


def node_of(cluster: ValkeyCluster, key: bytes) -> ValkeyNode:
    """The node that has `key`, or would have it."""
    slot = cluster.call(cluster.primaries[0], b"CLUSTER", b"KEYSLOT", key)
    assert isinstance(slot, int)
    return cluster.owner_of(slot)


def fields_key(namespace: NamespaceFields) -> bytes:
    return f"kvt1:{{{namespace.digest().hex()}}}:fields".encode()


def write(cluster: ValkeyCluster, key: bytes, value: bytes) -> None:
    assert cluster.call(node_of(cluster, key), b"SET", key, value) == b"OK"


# --- told ------------------------------------------------------------------------------------------------------------


def test_a_server_names_the_field_in_which_another_hosts_namespace_differs(cluster: ValkeyCluster) -> None:
    theirs = fields(salt="theirs", compute_dtype="float32")
    with server_on_a_host(cluster) as other, client_of(other, theirs, "theirs") as storing:
        hashes = storing.hashes(TOKENS)
        storing.match(hashes).release()
        storing.set(hashes, [bytes(LAYOUT.block_bytes)] * NUM_BLOCKS)
        key = fields_key(theirs)
        wait_until(lambda: cluster.call(node_of(cluster, LIST), b"EXISTS", LIST) == 1)
        assert cluster.call(node_of(cluster, key), b"EXISTS", key) == 1
        wait_until(lambda: num_stored(cluster) == NUM_BLOCKS)
    with server_on_a_host(cluster) as server, client_of(server, fields()) as client:
        found = explain(client, fields(), TOKENS)
        assert found.reason is MatchEnd.OTHER_NAMESPACE
        assert found.detail.startswith("144 of these tokens are cached as theirs (")
        assert found.detail.endswith("which differs in compute_dtype, salt")

        client.note(a_note(fields()))
        client.flush()
        noted = explain_request(client, "r1")
        assert noted is not None
        assert noted.detail.endswith("which differs in compute_dtype, salt")
        assert [known.name for known in client.namespaces()] == ["ours"], "the server has nothing of the other"
        assert {known.name for known in client.known_namespaces()} == {"ours", "theirs"}


def a_note(namespace: NamespaceFields) -> Explanation:
    return Explanation(
        request_id="r1",
        model="ours",
        namespace=namespace.digest().hex(),
        prompt_tokens=len(TOKENS),
        block_tokens=16,
        cached_tokens={},
        ended_at_tokens=0,
        reason=MatchEnd.NEVER_STORED,
        tier="server",
        first_tokens=tuple(TOKENS[:64]),
    )


def test_a_namespace_that_no_host_has_is_told_its_nearest(cluster: ValkeyCluster) -> None:
    far, near = fields(salt="far", lora="other", weights="x"), fields(salt="near")
    with engine_on_a_host(cluster, far, "far") as one, engine_on_a_host(cluster, near, "near") as other:
        store(one, far, TOKENS[16:])
        store(other, near, TOKENS[16:])
        with asked(cluster) as cluster_itself:
            found = explain(cluster_itself, fields(), TOKENS, tier="cluster")
            own = explain(cluster_itself, near, TOKENS, tier="cluster")
    with server_on_a_host(cluster) as server, kvtier.connect(server.unix, timeout_s=CALL_S) as client:
        by_server = explain(client, fields(), TOKENS)

    assert found.reason is MatchEnd.NEVER_STORED
    assert found.detail.startswith("nothing is cached with these settings; the nearest is near (")
    assert found.detail.endswith("which differs in salt")
    assert by_server.detail == found.detail
    assert (own.reason, own.detail) == (MatchEnd.NEVER_STORED, "")


def test_a_tenants_namespaces_are_neither_described_nor_shown(cluster: ValkeyCluster, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[alice]\ntoken = "the secret of alice"\n')
    theirs = fields(salt="theirs")
    with engine_on_a_host(cluster, theirs) as other:
        store(other, theirs)
    with cache_server("--tenants", str(file), *cluster_flags(cluster), tcp=True, memory="64MiB") as server:
        token = "the secret of alice"
        with kvtier.connect(server.tcp, token=token, layout=LAYOUT, namespace=fields(), timeout_s=CALL_S) as alice:
            hashes = alice.hashes(TOKENS)
            alice.match(hashes).release()
            alice.set(hashes, [bytes(LAYOUT.block_bytes)] * NUM_BLOCKS)
            wait_until(lambda: num_stored(cluster) == 2 * NUM_BLOCKS)
            assert [known.digest for known in alice.known_namespaces()] == [fields().digest().hex()]
    with asked(cluster) as cluster_itself:
        assert [known.digest for known in cluster_itself.known_namespaces()] == [theirs.digest().hex()]


def test_an_engines_own_fields_need_not_be_in_the_cluster(cluster: ValkeyCluster) -> None:
    """They are written behind its first blocks, and a question may come before."""
    theirs = fields(salt="theirs")
    with engine_on_a_host(cluster, theirs) as other:
        store(other, theirs)
    with asked(cluster) as cluster_itself:
        without = look_again(cluster_itself, a_note(fields()))
        found = look_again(cluster_itself, a_note(fields()), fields().document())

    assert without.detail.endswith("whose fields are unknown")
    assert found.detail.endswith("which differs in salt")


@pytest.mark.slow
def test_an_engine_without_a_cache_server_names_the_field(cluster: ValkeyCluster, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    prompt = list(range(10, 90))
    with open_engine(tmp_path, cluster=config_of(cluster), salt="theirs") as other:
        other.generate([prompt])
        settled(other)
    with open_engine(tmp_path, cluster=config_of(cluster), salt="ours") as llm:
        (missed,) = llm.generate([prompt])
        found = llm.explain(missed.request_id)

    assert found.reason is MatchEnd.OTHER_NAMESPACE
    assert found.detail.endswith("which differs in salt")


def test_the_command_asks_a_cluster_itself(cluster: ValkeyCluster, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    nodes = ",".join(config_of(cluster).valkey)
    options = ("--model", str(tmp_path), "--tokens", ",".join(map(str, TOKENS)), "--cluster-segment", str(SEGMENT))
    theirs = fields(salt="theirs")
    with engine_on_a_host(cluster, theirs) as other:
        store(other, theirs)
    told = run_explain(*options, "--cluster", nodes)
    without = run_explain("--cluster", nodes, "r1")
    away = run_explain(*options, "--cluster", "tls://127.0.0.1:1", "--cluster-ca-file", str(tmp_path / "config.json"))

    found = json.loads(told.stdout)
    assert (found["reason"], found["tier"]) == ("other namespace", "cluster")
    assert found["detail"].startswith("144 of these tokens are cached as theirs (")
    assert (without.returncode, away.returncode) == (2, 1)
    assert "Traceback" not in told.stderr + without.stderr + away.stderr


def run_explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier", "explain", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


# --- what is written -------------------------------------------------------------------------------------------------


def test_what_is_described_lives_on_as_long_as_blocks_are_stored(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = fields()
    with engine_on_a_host(cluster, namespace) as tier:
        store(tier, namespace)
        for key in (LIST, fields_key(namespace)):
            node = node_of(cluster, key)
            left_ms = cluster.call(node, b"PTTL", key)
            assert isinstance(left_ms, int)
            assert 0 < left_ms <= config_of(cluster).ttl_s * 1000
            cluster.call(node, b"UNLINK", key)
        store(tier, namespace, range(1000, 1040))
        with asked(cluster) as cluster_itself:
            assert cluster_itself.known_namespaces() == [], "not written with each block"

    monkeypatch.setattr(described, "_RENEWAL_S", 0.0)
    with engine_on_a_host(cluster, namespace) as tier, asked(cluster) as cluster_itself:
        for first in (2000, 3000):
            cluster.call(node_of(cluster, LIST), b"UNLINK", LIST)
            store(tier, namespace, range(first, first + 40))
            assert [known.digest for known in cluster_itself.known_namespaces()] == [namespace.digest().hex()]


def test_a_namespace_given_by_its_digest_alone_is_not_described(cluster: ValkeyCluster) -> None:
    namespace = fields()
    tier = open_cluster_tier(config_of(cluster), LAYOUT, namespace.digest(), TierMetrics())
    with contextlib.closing(tier), asked(cluster) as cluster_itself:
        assert tier.wait_until_known(CALL_S)
        store(tier, namespace)
        assert cluster_itself.known_namespaces() == []


def test_the_list_is_bounded_and_the_latest_stay(cluster: ValkeyCluster) -> None:
    with contextlib.closing(open_cluster(config_of(cluster))) as opened:
        assert opened.wait_until_known(CALL_S)
        described_ones = DescribedNamespaces(opened, ttl_s=3600.0)
        names = [Namespace(bytes([number]) * 32) for number in range(MAX_LISTED + 6)]
        for namespace in names:
            described_ones.describe(namespace, "n", 16, "{}", CALL_S)
        described_ones.describe(names[-1], "again", 16, "{}", CALL_S)
        described_ones.describe(names[0], "too long", 16, '"' + "a" * (64 << 10) + '"', CALL_S)
        known = described_ones.known(CALL_S)

    assert [each.namespace for each in known] == names[: -MAX_LISTED - 1 : -1]
    assert known[0].name == "again"


def test_descriptions_that_are_large_in_sum_are_read_up_to_a_bound(cluster: ValkeyCluster) -> None:
    """The latest are found; the others cost neither memory nor time."""
    text = '{"a":"' + "a" * (60 << 10) + '"}'
    with contextlib.closing(open_cluster(config_of(cluster))) as opened:
        assert opened.wait_until_known(CALL_S)
        described_ones = DescribedNamespaces(opened, ttl_s=3600.0)
        names = [Namespace(bytes([number]) * 32) for number in range(32)]
        for namespace in names:
            described_ones.describe(namespace, "n", 16, text, CALL_S)
        for node in cluster.primaries:
            cluster.call(node, b"CONFIG", b"RESETSTAT")
        known = described_ones.known(CALL_S)

    assert [each.namespace for each in known] == names[:-9:-1]
    assert sum(num_gets(cluster, node) for node in cluster.primaries) <= 1 + 16


def num_gets(cluster: ValkeyCluster, node: ValkeyNode) -> int:
    text = cluster.call(node, b"INFO", b"commandstats")
    assert isinstance(text, bytes)
    found = re.search(rb"cmdstat_get:calls=(\d+)", text)
    return 0 if found is None else int(found[1])


# --- hostile contents ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"nonsense",
        b"{}",
        b"[" * 50_000,
        b'[["zz",9999999999999]]',
        b'[["ab",9999999999999]]',
        b'[["' + b"0" * 64 + b'",99999999999999999999999]]',
        b'[["' + b"0" * 64 + b'",1]]',
        b"\xff" * 100,
        b"a" * (1 << 20),
    ],
    ids=range(10),
)
def test_a_list_that_is_none_is_a_miss_and_is_replaced(cluster: ValkeyCluster, value: bytes) -> None:
    write(cluster, LIST, value)
    namespace = fields()
    with asked(cluster) as cluster_itself, engine_on_a_host(cluster, namespace) as tier:
        assert explain(cluster_itself, namespace, TOKENS).reason is MatchEnd.NEVER_STORED
        store(tier, namespace)
        assert [known.digest for known in cluster_itself.known_namespaces()] == [namespace.digest().hex()]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"name":"n","block_tokens":16}',
        b'{"name":"n","block_tokens":0,"fields":{}}',
        b'{"name":"n","block_tokens":-1,"fields":{}}',
        b'{"name":"n","block_tokens":99999999999,"fields":{}}',
        b'{"name":1,"block_tokens":16,"fields":{}}',
        b'{"name":"n","block_tokens":16,"fields":[]}',
        b'{"name":"n","block_tokens":16,"fields":' + b'{"a":' * 40 + b"1" + b"}" * 41,
        b'{"name":"n","block_tokens":16,"fields":{"a":"' + b"a" * (1 << 20) + b'"}}',
        b'{"name":"n","block_tokens":16,"fields":{"a":"\xff"}}',
    ],
    ids=range(12),
)
def test_a_description_that_is_none_is_left_out(cluster: ValkeyCluster, value: bytes) -> None:
    theirs, other = fields(salt="theirs"), fields(salt="other")
    with engine_on_a_host(cluster, theirs) as one, engine_on_a_host(cluster, other, "other") as two:
        store(one, theirs)
        store(two, other, TOKENS[16:])
        write(cluster, fields_key(theirs), value)
        with asked(cluster) as cluster_itself:
            assert [known.name for known in cluster_itself.known_namespaces()] == ["other"]
            assert explain(cluster_itself, fields(), TOKENS).reason is MatchEnd.NEVER_STORED


def test_keys_of_another_type_are_left_out_and_replaced(cluster: ValkeyCluster) -> None:
    namespace = fields()
    for key in (LIST, fields_key(namespace)):
        cluster.call(node_of(cluster, key), b"RPUSH", key, b"x")
    with asked(cluster) as cluster_itself, engine_on_a_host(cluster, namespace) as tier:
        assert cluster_itself.known_namespaces() == []
        store(tier, namespace)
        assert len(cluster_itself.known_namespaces()) == 1


def test_a_name_that_would_move_the_cursor_is_escaped(cluster: ValkeyCluster) -> None:
    theirs = fields(salt="theirs")
    with engine_on_a_host(cluster, theirs, "a\x1b[2Jname\n") as tier, asked(cluster) as cluster_itself:
        store(tier, theirs)
        (known,) = cluster_itself.known_namespaces()

    assert known.name.isprintable()
    assert "\x1b" not in known.name
