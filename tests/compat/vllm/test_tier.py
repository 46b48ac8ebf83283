"""A cache server below vLLM's own offloading: pages outlive the engine, and no failure changes an answer."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import vllm
from vllm import LLM
from vllm.v1.kv_offload.base import LookupResult

from kvtier.errors import ConfigError
from kvtier.plugins.vllm import tier as tier_module
from kvtier.plugins.vllm.releases import release_of
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import VOCAB_SIZE
from tests.compat.vllm.engines import (
    add_noise,
    answers_without_cache,
    ask,
    ask_one,
    begin,
    drive,
    engine,
    model_folder,
    namespaces_at,
    num_held,
    tokens_of,
    wait_until,
)

pytestmark = pytest.mark.skipif(
    release_of(vllm.__version__) < (0, 32), reason="the spec with which vLLM offloads on CPUs is made for 0.32"
)

_PROMPTS = [tokens_of(300, seed=number) for number in range(1, 5)]
_PROMPT = _PROMPTS[0]
_NUM_PAGES = 9
"""Full ones of a prompt, each of 32 tokens."""
_DISK = ("--disk", "64MiB")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers_without_cache(model_folder(), _PROMPTS)


def _offloading(server: str | None = None, **settings: object) -> dict[str, Any]:
    """Arguments of an engine with vLLM's own offloading, and a cache server below."""
    address: Mapping[str, object] = {} if server is None else {"server": server}
    tier = {"type": "KvtierTier", "module_path": "kvtier.plugins.vllm.tier", **address, **settings}
    return {
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "HostTieringSpec",
                "spec_module_path": "benchmarks.vllm.native_spec",
                "cpu_bytes_to_use": 16 << 20,
                "secondary_tiers": [tier],
            },
        },
    }


def _num_pages(server: ServerProcess) -> int:
    return sum(max(known.blocks, known.disk_blocks) for known in namespaces_at(server.unix))


def _wait_until_stored(llm: LLM, server: ServerProcess, num_pages: int = _NUM_PAGES) -> None:
    """vLLM hands pages down with its steps."""

    def is_stored() -> bool:
        llm.llm_engine.step()
        return _num_pages(server) >= num_pages

    wait_until(is_stored, f"{num_pages} pages stored")


def _forget_all(llm: LLM) -> None:
    """Empty vLLM's own prefix cache and the host memory of its offloading: what is a hit then came from the server."""

    def is_empty() -> bool:
        llm.llm_engine.step()
        return bool(llm.reset_prefix_cache(reset_connector=True))

    wait_until(is_empty, "vLLM's caches empty")


def _store_all(llm: LLM, server: ServerProcess) -> None:
    ask(llm, _PROMPTS)
    _wait_until_stored(llm, server, _NUM_PAGES * len(_PROMPTS))
    _forget_all(llm)


def test_a_prefix_comes_from_the_server_after_a_reset_and_in_a_new_engine(
    server: ServerProcess, expected: list[list[int]]
) -> None:
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        cold = ask_one(llm, _PROMPT)
        _wait_until_stored(llm, server)
        _forget_all(llm)
        warm = ask_one(llm, _PROMPT)
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        again = ask_one(llm, _PROMPT)

    assert cold.tokens == warm.tokens == again.tokens == expected[0]
    assert (cold.num_cached, warm.num_cached, again.num_cached) == (0, 288, 288)
    assert num_held(server.unix) == 0


def test_hashes_that_others_cannot_rely_on_are_refused_in_one_sentence(
    server: ServerProcess, expected: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(tier_module, "logger", logging.getLogger("tier under test"))
    arguments = {**_offloading(server.unix), "prefix_caching_hash_algo": "sha256"}

    with engine(model_folder(), **arguments) as llm:
        answers = ask(llm, _PROMPTS[:2])

    assert [answer.tokens for answer in answers] == expected[:2]
    assert namespaces_at(server.unix) == []
    assert [record.getMessage() for record in caplog.records if record.name == "tier under test"] == [
        "kvtier keeps nothing of vLLM's offloading: its hashes are sha256, which differ between processes: "
        "set --prefix-caching-hash-algo sha256_cbor"
    ]


@pytest.mark.nightly
def test_an_engine_in_processes_of_its_own_hits_what_another_stored(
    server: ServerProcess, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        ask_one(llm, _PROMPT)
        _wait_until_stored(llm, server)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    with engine(model_folder(), **_offloading(server.unix)) as llm:
        warm = ask_one(llm, _PROMPT)

    assert (warm.tokens, warm.num_cached) == (expected[0], 288)


@pytest.mark.nightly
def test_after_a_restart_of_the_server_pages_come_from_disk(tmp_path: Path, expected: list[list[int]]) -> None:
    options = ("--folder", str(tmp_path / "cache"), *_DISK)
    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), **_offloading(server.unix)) as llm:
        ask_one(llm, _PROMPT)
        _wait_until_stored(llm, server)

    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), **_offloading(server.unix)) as llm:
        warm = ask_one(llm, _PROMPT)

    assert (warm.tokens, warm.num_cached) == (expected[0], 288)


@pytest.mark.nightly
def test_noise_on_the_servers_disk_is_a_miss(tmp_path: Path, expected: list[list[int]]) -> None:
    options = ("--folder", str(tmp_path / "cache"), *_DISK)
    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), **_offloading(server.unix)) as llm:
        _store_all(llm, server)
    add_noise(tmp_path / "cache" / "blocks.kvtier")

    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), **_offloading(server.unix)) as llm:
        answers = [ask_one(llm, prompt) for prompt in _PROMPTS]

    assert [answer.tokens for answer in answers] == expected
    assert min(answer.num_cached for answer in answers) < 288


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_server_that_is_gone_or_hung_while_pages_are_loaded_changes_no_answer(
    server: ServerProcess, expected: list[list[int]], number: signal.Signals, num_steps: int
) -> None:
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        _store_all(llm, server)
        for name, prompt in enumerate(_PROMPTS):
            begin(llm, str(name), prompt)
        for _ in range(num_steps):
            llm.llm_engine.step()
        server.send_signal(number)
        driven = drive(llm)

    assert [driven.tokens[str(name)] for name in range(len(_PROMPTS))] == expected


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_gone_or_hung_while_pages_are_stored_changes_no_answer(
    server: ServerProcess, expected: list[list[int]], number: signal.Signals
) -> None:
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        for name, prompt in enumerate(_PROMPTS):
            begin(llm, str(name), prompt)
        for _ in range(3):
            llm.llm_engine.step()
        server.send_signal(number)
        driven = drive(llm)
        _forget_all(llm)
        again = ask(llm, _PROMPTS)

    assert [driven.tokens[str(name)] for name in range(len(_PROMPTS))] == expected
    assert [answer.tokens for answer in again] == expected


@pytest.mark.nightly
def test_a_server_that_comes_back_is_used_again(tmp_path: Path, expected: list[list[int]]) -> None:
    options = ("--folder", str(tmp_path / "cache"), *_DISK)
    with cache_server(*options, folder=tmp_path) as first, engine(model_folder(), **_offloading(first.unix)) as llm:
        _store_all(llm, first)
        first.stop()
        assert [answer.tokens for answer in ask(llm, _PROMPTS)] == expected
        with cache_server(*options, folder=tmp_path):

            def hits() -> bool:
                _forget_all(llm)
                answer = ask_one(llm, _PROMPT)
                assert answer.tokens == expected[0]
                return answer.num_cached == 288

            wait_until(hits, "a hit")


@pytest.mark.nightly
def test_pages_of_other_weights_are_not_taken(server: ServerProcess) -> None:
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        ask_one(llm, _PROMPT)
        _wait_until_stored(llm, server)
    (expected,) = answers_without_cache(model_folder(seed=1), [_PROMPT])

    with engine(model_folder(seed=1), **_offloading(server.unix)) as llm:
        answer = ask_one(llm, _PROMPT)

    assert (answer.tokens, answer.num_cached) == (expected, 0)


@pytest.mark.nightly
def test_pages_of_another_size_are_not_taken(server: ServerProcess, expected: list[list[int]]) -> None:
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        ask_one(llm, _PROMPT)
        _wait_until_stored(llm, server)

    with engine(model_folder(), page_tokens=64, **_offloading(server.unix)) as llm:
        answer = ask_one(llm, _PROMPT)

    assert (answer.tokens, answer.num_cached) == (expected[0], 0)


@pytest.mark.nightly
def test_pages_of_a_model_with_windows_beside_full_attention_come_back(server: ServerProcess, tmp_path: Path) -> None:
    """vLLM keeps its layers in several groups, of which the connector keeps nothing."""
    model = tmp_path / "model"
    _save_windowed_model(model)
    (expected,) = answers_without_cache(model, [_PROMPT])
    with engine(model, **_offloading(server.unix)) as llm:
        cold = ask_one(llm, _PROMPT)
        _wait_until_stored(llm, server)
        _wait_until_quiet(llm)
        _forget_all(llm)
        warm = ask_one(llm, _PROMPT)

    assert cold.tokens == warm.tokens == expected
    assert warm.num_cached >= 256


@pytest.mark.nightly
def test_pages_of_two_ranks_come_back_and_are_not_those_of_one(
    server: ServerProcess, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model_folder(), **_offloading(server.unix), **ranks) as llm:
        cold = ask_one(llm, _PROMPT)
        wait_until(lambda: _num_pages(server) >= _NUM_PAGES, "pages stored")
        wait_until(lambda: llm.reset_prefix_cache(reset_connector=True), "vLLM's caches empty")
        warm = ask_one(llm, _PROMPT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with engine(model_folder(), **_offloading(server.unix)) as llm:
        alone = ask_one(llm, _PROMPT)

    assert cold.tokens == warm.tokens == alone.tokens == expected[0]
    assert (cold.num_cached, warm.num_cached, alone.num_cached) == (0, 288, 0)


def _save_windowed_model(folder: Path) -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=1024,
        sliding_window=64,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Gemma3ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # so that other KV gives other tokens
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder)


def _wait_until_quiet(llm: LLM) -> None:
    """Until vLLM has handed down everything: its groups' pages are stored one after the other."""
    wait_until(
        lambda: not llm.llm_engine.step() and not llm.llm_engine.engine_core.engine_core.scheduler.has_requests()
    )


def test_wrong_settings_are_refused_with_one_sentence() -> None:
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))

    with pytest.raises(ConfigError, match=r"^kvtier: secondary_tiers: .*`colour`"):
        tier_module.KvtierTier(SimpleNamespace(), view, "KvtierTier", colour="red")


def test_a_tier_that_is_not_told_whose_pages_it_keeps_keeps_nothing_and_ends_every_job() -> None:
    view = memoryview(bytearray(8192)).cast("B", (2, 4096))
    tier = tier_module.KvtierTier(SimpleNamespace(), view, "KvtierTier", server="unix:/nowhere")
    request = SimpleNamespace(req_id="request")
    tier.submit_store(SimpleNamespace(job_id=7, keys=[b"a", b"b"], chunk_ids=[0, 1], req_context=request))

    assert tier.lookup(b"a", request) is LookupResult.MISS
    assert [(result.job_id, result.success) for result in tier.get_finished_jobs()] == [(7, False)]
    assert list(tier.get_finished_jobs()) == []
    tier.drain_jobs()
    tier.shutdown()
