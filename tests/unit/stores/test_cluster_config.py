"""Settings of a cluster: what cannot work, or is not safe, is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, TierRefused
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection
from kvtier.stores.valkey.slots import NUM_SLOTS, read_redirection, read_slots
from tests.support.waiting import FOR_EVER_S

ASKED = NodeAddress("10.0.0.1", 6379)


def test_nodes_are_hosts_and_ports() -> None:
    config = ClusterConfig(valkey=("tls://a.example:6379", "tls://[2001:db8::1]:7000"))

    assert config.seeds == [NodeAddress("a.example", 6379), NodeAddress("2001:db8::1", 7000)]
    assert [str(seed) for seed in config.seeds] == ["a.example:6379", "[2001:db8::1]:7000"]
    assert config.access().tls is not None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"valkey": ()}, "valkey must name from 1 to 64 nodes"),
        ({"valkey": ("a:6379",)}, "is not a node: write tls://host:port"),
        ({"valkey": ("tls://a",)}, "is not a node"),
        ({"valkey": ("tls://a:0",)}, "is not a node"),
        ({"valkey": ("tls://a:999999999999",)}, "is not a node"),
        ({"valkey": ("redis://a:6379",)}, "is not a node"),
        ({"valkey": ("tls://a:1", "tcp://127.0.0.1:1")}, "nodes with TLS or nodes without, not both"),
        (
            {"valkey": ("tcp://10.0.0.1:6379",)},
            "10.0.0.1:6379 is another host: write tls://10.0.0.1:6379, or plaintext",
        ),
        ({"valkey": ("tcp://cache.example:6379",)}, "is another host"),
        ({"valkey": ("tls://a:1",), "user": "kvtier"}, "user needs a password"),
        ({"valkey": ("tcp://127.0.0.1:1",), "ca_file": "ca.pem"}, "ca_file is about TLS"),
        ({"valkey": ("tls://a:1",), "ttl_s": 1.0}, "ttl must be from 60 s to ten years"),
        ({"valkey": ("tls://a:1",), "ttl_s": float("nan")}, "ttl must be from 60 s to ten years"),
        ({"valkey": ("tls://a:1",), "segment": 0}, "segment must be from 1 to 65536 blocks, not 0"),
        ({"valkey": ("tls://a:1",), "timeout_s": float("inf")}, "timeout_s must be more than 0"),
    ],
)
def test_what_cannot_work_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("[", r"\[")):
        ClusterConfig(**settings)


def test_plaintext_to_other_hosts_has_to_be_told() -> None:
    assert not ClusterConfig(valkey=("tcp://10.0.0.1:6379",), plaintext=True).is_tls
    assert not ClusterConfig(valkey=("tcp://localhost:6379", "tcp://[::1]:6379", "tcp://127.9.9.9:1")).is_tls


def test_a_node_that_the_cluster_names_is_not_spoken_to_without_tls_either() -> None:
    with pytest.raises(TierRefused, match=r"192\.0\.2\.1:6379 is another host, and is not spoken to without TLS"):
        NodeConnection(NodeAddress("192.0.2.1", 6379), NodeAccess(), FOR_EVER_S)


def test_a_ca_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    wrong = tmp_path / "ca.pem"
    wrong.write_text("this is no certificate")
    for path in (wrong, tmp_path / "absent.pem"):
        with pytest.raises(ConfigError, match=rf"ca_file {path.name} cannot be used: "):
            ClusterConfig(valkey=("tls://a:1",), ca_file=str(path)).access()


def test_slots_are_read_with_their_primaries() -> None:
    owners = read_slots([[0, 99, [b"10.0.0.2", 1, b"id", []], [b"10.0.0.3", 2, b"id"]], [100, 200, [None, 3]]], ASKED)

    assert owners[0] == owners[99] == NodeAddress("10.0.0.2", 1)
    assert owners[150] == NodeAddress("10.0.0.1", 3), "a node without a name has that of the one that was asked"
    assert owners[201:] == [None] * (NUM_SLOTS - 201)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"OK",
        [[0, NUM_SLOTS, [b"h", 1]]],
        [[5, 4, [b"h", 1]]],
        [[0, 1, [b"h", 99999]]],
        [[0, 1, [b"h" * 300, 1]]],
        [[0, 1]],
        [[0, 1, b"h"]],
        [7],
    ],
)
def test_slots_that_make_no_sense_are_refused(reply: Any) -> None:
    with pytest.raises(Exception, match="the cluster"):
        read_slots(reply, ASKED)


def test_a_slot_that_moved_is_read() -> None:
    assert read_redirection("MOVED 3999 10.0.0.5:6381", ASKED) == (3999, NodeAddress("10.0.0.5", 6381))
    assert read_redirection("ASK 1 ::1:6381", ASKED) == (1, NodeAddress("::1", 6381))
    assert read_redirection("MOVED 1 :6381", ASKED) == (1, NodeAddress("10.0.0.1", 6381))
    for text in ("MOVED", "MOVED x h:1", "MOVED 16384 h:1", "MOVED 1 h", "MOVED 1 h:99999", "MOVED 1 h:1 more"):
        with pytest.raises(Exception, match="the cluster"):
            read_redirection(text, ASKED)
