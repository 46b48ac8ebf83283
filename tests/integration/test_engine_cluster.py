"""Engines that share a Valkey cluster: what one has computed is a hit for another; its failures cost no answer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.engine.llm import LLM
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.clustered_servers import cluster_flags, num_stored
from tests.support.engine_building import MANAGERS
from tests.support.tiered_engines import (
    Asking,
    Question,
    answers,
    ask,
    assert_nothing_held,
    assert_same_answers,
    cached_by_tier,
    cold,
    full_blocks,
    open_engine,
    questions,
    settled,
    tokens,
)
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)

pytestmark = pytest.mark.slow  # each starts a cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(3) as running:
        yield running


def settings(cluster: ValkeyCluster, **more: Any) -> dict[str, Any]:
    seeds = tuple(f"tcp://{seed}" for seed in cluster.seeds)
    return {"cluster": ClusterConfig(valkey=seeds, segment=3, timeout_s=CALL_S), **more}


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_a_second_engine_finds_what_the_first_has_computed(
    model: Path, cluster: ValkeyCluster, manager: str, schedule: str
) -> None:
    """From its first request on, and however the prompt was hashed and offered in parts."""
    asked = questions()
    expected = cold(model, asked)
    kept = settings(cluster, block_manager=manager, schedule=schedule, max_num_batched_tokens=40)
    with open_engine(model, **kept) as llm:
        assert_same_answers(ask(llm, asked), expected)
        settled(llm)
        assert_nothing_held(llm)
    with open_engine(model, **kept) as llm:
        found = ask(llm, asked[:1])
        assert_same_answers(found, expected[:1])
        if manager not in ("naive", "disable_prefix_caching"):
            assert cached_by_tier(found) == {"cluster": full_blocks(asked[0].prompt)}
        assert_same_answers(ask(llm, asked[1:]), expected[1:])
        assert_nothing_held(llm)


@contextlib.contextmanager
def engine_of_a_host(model: Path, cluster: ValkeyCluster, **more: Any) -> Iterator[LLM]:
    """An engine with a cache server of its own, above the cluster."""
    with cache_server(*cluster_flags(cluster), memory="16MiB") as server:
        with open_engine(model, cache_server=server.unix, cache_server_timeout_s=CALL_S, **more) as llm:
            yield llm


def test_engines_of_two_cache_servers_share_the_cluster_below_them(model: Path, cluster: ValkeyCluster) -> None:
    """From the first request on. What the first engine answered is found, too, when the chat goes on elsewhere."""
    (question, *_) = asked = questions()[:3]
    expected = cold(model, asked)
    with engine_of_a_host(model, cluster) as one:
        outputs = ask(one, asked[:1])
        assert_same_answers(outputs, expected[:1])
        settled(one)
        answer = outputs[0].outputs[0].token_ids
        said = [*question.prompt, *answer]
        wait_until(lambda: num_stored(cluster) == (len(said) - 1) // 16)
        with engine_of_a_host(model, cluster) as other:
            found = ask(other, asked[:1])
            assert_same_answers(found, expected[:1])
            assert cached_by_tier(found) == {"cluster": full_blocks(question.prompt)}
            assert_nothing_held(other)
        with engine_of_a_host(model, cluster) as other:
            next_turn = dataclasses.replace(question, prompt=[*said, *tokens(99, 40)])
            found = ask(other, [next_turn])
            assert_same_answers(found, cold(model, [next_turn]))
            assert cached_by_tier(found) == {"cluster": (len(said) - 1) // 16 * 16}
            assert_same_answers(ask(other, asked), expected)
            assert_nothing_held(other)


def is_announced(cluster: ValkeyCluster) -> bool:
    """An engine has said that it is computing something."""
    found = [cluster.call(node, b"KEYS", b"*:computing") for node in cluster.primaries]
    return any(found)


@pytest.mark.parametrize("below", ["server", "engine"])
def test_an_engine_waits_for_what_another_host_is_computing(model: Path, cluster: ValkeyCluster, below: str) -> None:
    """Sooner or later it does: when it gets all of a prompt that the cluster had a part of when it was asked."""

    def opened() -> contextlib.AbstractContextManager[LLM]:
        if below == "server":
            return engine_of_a_host(model, cluster, max_num_batched_tokens=16)
        return open_engine(model, **settings(cluster, max_num_batched_tokens=16))

    with opened() as one, opened() as other:
        for seed in range(1000, 1030):
            before = num_stored(cluster)
            question = Question(tokens(seed, 400))
            with Asking(one, [question]) as asking:
                wait_until(lambda: is_announced(cluster))
                num_before = num_stored(cluster) - before
                found = ask(other, [question])
                assert answers(found) == answers(asking.result())
            settled(one)
            settled(other)
            if cached_by_tier(found) == {"cluster": full_blocks(question.prompt)} and num_before < 20:
                break
            wait_until(lambda: not is_announced(cluster))
        else:
            pytest.fail("the second engine never waited for the first")
        assert_nothing_held(one)
        assert_nothing_held(other)


def test_a_dead_cluster_below_a_cache_server_costs_no_answer(model: Path, cluster: ValkeyCluster) -> None:
    asked = questions()
    expected = answers(cold(model, asked))
    with engine_of_a_host(model, cluster) as llm:
        with Asking(llm, asked) as asking:
            for node in cluster.primaries:
                node.kill()
            assert answers(asking.result()) == expected
        assert answers(ask(llm, asked)) == expected
        assert_nothing_held(llm)


def test_a_cluster_lies_beside_a_cache_server(model: Path, cluster: ValkeyCluster) -> None:
    asked = questions()[:3]
    expected = cold(model, asked)
    for number in range(2):  # the second is another host: its own cache server is empty
        with (
            cache_server(memory="16MiB") as server,
            open_engine(model, **settings(cluster, cache_server=server.unix)) as llm,
        ):
            outputs = ask(llm, asked[:1])
            assert_same_answers(outputs, expected[:1])
            assert set(cached_by_tier(outputs)) == ({"cluster"} if number else set())
            assert_same_answers(ask(llm, asked), expected)
            settled(llm)


@pytest.mark.parametrize("load", ["stores", "loads"])
def test_a_node_killed_at_any_moment_costs_no_answer(model: Path, cluster: ValkeyCluster, load: str) -> None:
    asked = questions()
    expected = answers(cold(model, asked))
    kept = settings(cluster, max_num_batched_tokens=40)
    if load == "loads":
        with open_engine(model, **kept) as llm:
            ask(llm, asked)
            settled(llm)
    with open_engine(model, **kept) as llm:
        with Asking(llm, asked) as asking:
            for node in cluster.primaries[:2]:
                node.kill()
            assert answers(asking.result()) == expected
        assert answers(ask(llm, asked)) == expected
        assert_nothing_held(llm)
