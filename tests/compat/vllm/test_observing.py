"""The plug-in's reports: vLLM's own metrics, and the reason why a request found no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvtier
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.tiers.explanation import Explanation, MatchEnd
from tests.compat.vllm.engines import (
    ask_one,
    begin,
    counter,
    drive,
    engine,
    forget_prefixes,
    model_folder,
    tokens_of,
    wait_until,
    wait_until_stored,
)
from tests.support.clustered_servers import cluster_flags, num_stored
from tests.support.valkey import valkey_cluster

_PROMPT = tokens_of(300)


def _explanation(server: ServerProcess, request_id: str) -> Explanation:
    with kvtier.connect(server.unix) as client:
        wait_until(lambda: client.noted(request_id) is not None, f"a note on {request_id}")
        noted = client.noted(request_id)
    assert noted is not None
    return Explanation.from_json(noted)


def test_loads_and_stores_are_on_vllms_metrics(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT, max_tokens=1)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        ask_one(llm, _PROMPT, max_tokens=1)
        ask_one(llm, tokens_of(20, seed=3))  # what the last load was counted as comes with a step

        assert counter(llm, "vllm:kvtier_loaded_tokens_memory") == 288
        assert counter(llm, "vllm:kvtier_loaded_tokens_disk") == 0
        assert counter(llm, "vllm:kvtier_stored_blocks") >= 18
        assert counter(llm, "vllm:kvtier_failed_loads") == 0


def test_hits_on_disk_are_counted_as_such(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)

    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), server.unix) as llm:
        begin(llm, "from-disk", _PROMPT)
        drive(llm)
        ask_one(llm, tokens_of(20, seed=3))
        explanation = _explanation(server, "from-disk")

        assert counter(llm, "vllm:kvtier_loaded_tokens_disk") == 288
    assert explanation.cached_tokens == {"device": 0, "server": 0, "disk": 288}


def test_hits_in_a_cluster_are_counted_as_such() -> None:
    with valkey_cluster(1) as cluster:
        options = cluster_flags(cluster)
        with cache_server(*options) as server, engine(model_folder(), server.unix) as llm:
            ask_one(llm, _PROMPT)
            wait_until_stored(server.unix, _PROMPT)
            wait_until(lambda: num_stored(cluster) >= 18, "18 blocks in the cluster")

        with cache_server(*options) as server, engine(model_folder(), server.unix) as llm:
            begin(llm, "from-cluster", _PROMPT)
            drive(llm)
            ask_one(llm, tokens_of(20, seed=3))
            explanation = _explanation(server, "from-cluster")

            assert counter(llm, "vllm:kvtier_loaded_tokens_cluster") == 288
            assert counter(llm, "vllm:kvtier_loaded_tokens_tcp") == 0
    assert explanation.cached_tokens == {"device": 0, "server": 0, "disk": 0, "cluster": 288}


def test_a_request_is_explained_by_the_id_that_its_client_knows(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        begin(llm, "cold", _PROMPT)
        drive(llm)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        begin(llm, "warm", _PROMPT[:160] + tokens_of(100, seed=7))
        drive(llm)
        cold, warm = _explanation(server, "cold"), _explanation(server, "warm")
        command = [sys.executable, "-m", "kvtier", "explain", "warm", "--server", server.unix]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert (cold.reason, cold.ended_at_tokens) == (MatchEnd.NEVER_STORED, 0)
    assert warm.cached_tokens == {"device": 0, "server": 160, "disk": 0}
    assert (warm.reason, warm.ended_at_tokens) == (MatchEnd.NEVER_STORED, 160)
    assert "160 of 260 prompt tokens were cached" in told


def test_with_a_dead_server_the_explanation_is_lost_and_nothing_else(tmp_path: Path) -> None:
    with engine(model_folder(), f"unix:{tmp_path}/nobody") as llm:
        begin(llm, "alone", _PROMPT)
        assert drive(llm).tokens["alone"]


def test_resetting_the_connector_forgets_what_is_cached_of_the_model(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT)
        forget_prefixes(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        answer = ask_one(llm, _PROMPT)

    assert answer.num_cached == 0
