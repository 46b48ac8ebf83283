"""`kvtier serve` on two hosts' worth of deployments over one Valkey cluster, and what `kvtier check` says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.deploy.check.cluster import notes_on_cluster
from kvtier.stores.valkey.config import ClusterConfig
from tests.support.clustered_servers import num_stored
from tests.support.deployments import DeploymentProcess
from tests.support.serving import MODEL, QUESTIONS, TEXT, ask, save_model
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # each starts a cluster


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(3) as running:
        yield running


def text_of(cluster: ValkeyCluster) -> str:
    seeds = ", ".join(f'"tcp://{seed}"' for seed in cluster.seeds)
    return TEXT + f"  cluster: {{valkey: [{seeds}], timeout_s: 60}}\n"


def test_a_prompt_that_one_host_has_answered_is_a_hit_on_another(cluster: ValkeyCluster, tmp_path: Path) -> None:
    question = QUESTIONS[0] * 4
    answers = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_model(folder / MODEL)
        with DeploymentProcess(folder, text_of(cluster)) as deployment:
            answers.append(ask(deployment, question))
            num_blocks = answers[0].prompt_tokens // 16
            wait_until(lambda num_blocks=num_blocks: num_stored(cluster) >= num_blocks)  # type: ignore[misc]
            assert f"cluster tcp://{cluster.seeds[0]}" in deployment.log()

    first, second = answers
    assert first.text == second.text
    assert first.cached_tokens == 0
    assert second.cached.get("cluster", 0) == (second.prompt_tokens - 1) // 16 * 16


def config_of(cluster: ValkeyCluster) -> ClusterConfig:
    return ClusterConfig(valkey=tuple(f"tcp://{seed}" for seed in cluster.seeds))


def test_a_cluster_that_is_set_up_well_needs_no_word(cluster: ValkeyCluster) -> None:
    for node in cluster.primaries:
        cluster.call(node, b"CONFIG", b"SET", b"maxmemory", b"100mb")

    assert list(notes_on_cluster(config_of(cluster))) == []


def test_settings_that_hurt_are_told_by_node(cluster: ValkeyCluster) -> None:
    one, other, last = cluster.primaries
    cluster.call(one, b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction", b"maxmemory", b"100mb")
    cluster.call(other, b"CONFIG", b"SET", b"cluster-require-full-coverage", b"yes")
    cluster.call(last, b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru", b"maxmemory", b"100mb")

    notes = list(notes_on_cluster(config_of(cluster)))

    assert sorted(notes) == sorted(
        [
            f"cluster: {one.address} has maxmemory-policy noeviction: once it is full it takes no block; "
            "set volatile-ttl",
            f"cluster: {other.address} has maxmemory 0: it takes memory without end",
            f"cluster: {other.address} has cluster-require-full-coverage yes: one lost node stops all of them; set no",
            f"cluster: {last.address} has maxmemory-policy allkeys-lru; with volatile-ttl a prompt loses its end first",
        ]
    )


def test_a_cluster_that_does_not_answer_is_told(cluster: ValkeyCluster) -> None:
    for node in cluster.primaries:
        node.kill()

    notes = list(notes_on_cluster(config_of(cluster)))

    assert [note.endswith("does not answer: Connection refused") for note in notes] == [True, True, True, False]
    assert notes[-1] == "cluster: no node answers: engines go on without it until one does"
