"""`kvtier cluster create` over real servers: the cluster of new ones, and the errors for others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtier.cli.main import main
from kvtier.deploy.check.cluster import notes_on_cluster
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.node import NodeAccess
from tests.support.valkey import ValkeyNode, valkey_nodes

pytestmark = pytest.mark.slow  # each starts servers

WELL = ("--maxmemory", "100mb")


def urls(nodes: Sequence[ValkeyNode]) -> list[str]:
    return [f"tcp://{node.address}" for node in nodes]


def create(nodes: Sequence[ValkeyNode], *options: str) -> Result:
    return CliRunner().invoke(main, ["cluster", "create", *options, *urls(nodes)])


@pytest.mark.parametrize("count", [1, 3, 5])
def test_new_servers_become_a_cluster_that_serves_all_slots(count: int) -> None:
    with valkey_nodes(count, *WELL) as nodes:
        made = create(nodes)

        assert made.output == f"a cluster of {count} nodes, all slots served\n"
        assert list(notes_on_cluster(ClusterConfig(valkey=tuple(urls(nodes[-1:]))))) == []
        assert all(b"cluster_slots_ok:16384" in cluster_info(node) for node in nodes)


def cluster_info(node: ValkeyNode, access: NodeAccess | None = None) -> bytes:
    text = node.call(b"CLUSTER", b"INFO", access=access)
    assert isinstance(text, bytes)
    return text


def test_a_server_that_is_in_a_cluster_is_refused_and_the_others_stay_as_they_were() -> None:
    with valkey_nodes(3, *WELL) as nodes:
        assert create(nodes[:1]).exit_code == 0

        refused = create([*nodes[1:], nodes[0]])

        assert refused.exit_code == 1
        assert refused.output == (
            f"Error: {nodes[0].address} is in a cluster already, or was in one: CLUSTER RESET on it makes it as new\n"
        )
        assert all(b"cluster_slots_assigned:0" in cluster_info(node) for node in nodes[1:])
        assert create(nodes[1:]).exit_code == 0


def test_a_dead_server_or_one_without_cluster_mode_is_one_sentence() -> None:
    with valkey_nodes(2, *WELL) as nodes:
        nodes[1].kill()
        dead = create(nodes, "--timeout", "1")
        assert (dead.exit_code, dead.output) == (
            1,
            f"Error: the cluster's node {nodes[1].address} does not answer: Connection refused\n",
        )
        assert b"cluster_slots_assigned:0" in cluster_info(nodes[0])
    with valkey_nodes(1, "--cluster-enabled", "no") as nodes:
        alone = create(nodes)
        assert alone.exit_code == 1
        assert alone.output == (
            f"Error: the cluster's node {nodes[0].address} refused: ERR This instance has cluster support disabled\n"
        )


def test_a_server_that_is_only_just_being_started_is_waited_for() -> None:
    with valkey_nodes(2, *WELL) as nodes:
        nodes[1].kill()
        starting = threading.Timer(0.5, nodes[1].start)
        starting.start()
        made = create(nodes)
        starting.join()

        assert made.exit_code == 0


def test_a_user_with_a_password_creates_it_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("the right one\n")
    wrong.write_text("a wrong one\n")
    access = NodeAccess("default", "the right one")
    with valkey_nodes(3, *WELL, "--requirepass", "the right one") as nodes:
        refused = create(nodes, "--user", "default", "--password-file", str(wrong))
        assert refused.exit_code == 1
        assert "WRONGPASS" in refused.output
        assert "a wrong one" not in refused.output
        assert create(nodes, "--user", "default", "--password-file", str(right)).exit_code == 0
        assert all(b"cluster_state:ok" in cluster_info(node, access) for node in nodes)


def test_what_cannot_be_a_cluster_is_told_before_anybody_is_asked() -> None:
    runner = CliRunner()
    twice = runner.invoke(main, ["cluster", "create", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1"])
    assert (twice.exit_code, twice.output) == (1, "Error: a node is named twice\n")
    plain = runner.invoke(main, ["cluster", "create", "tcp://192.0.2.1:1"])
    assert plain.exit_code == 1
    assert "192.0.2.1:1 is another host" in plain.output
