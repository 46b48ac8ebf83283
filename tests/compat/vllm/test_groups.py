"""Models that vLLM keeps in several groups, or in pages whose inside is its own: answers are those without the plug-in,
and a prefix that was computed once is a hit for the next engine."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.model_executor.layers.attention import Attention

from kvtier.plugins.vllm import connector, identity
from kvtier.plugins.vllm.compat import HANDS_OVER_STATES
from kvtier.testing.servers import ServerProcess, cache_server
from tests.compat.vllm.engines import (
    answers_without_cache,
    ask,
    ask_one,
    begin,
    counter,
    drive,
    engine,
    forget_prefixes,
    namespaces_at,
    num_held,
    tokens_of,
)
from tests.compat.vllm.group_models import WINDOW_TOKENS, group_model_folder
from tests.support.waiting import wait_until

_PROMPT = tokens_of(300)
"""Several windows long."""

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma3 in one group": {"disable_hybrid_kv_cache_manager": True},
    "mistral": {},
    "llama4": {"disable_hybrid_kv_cache_manager": False},
    "llama4 in one group": {"disable_hybrid_kv_cache_manager": True},
    "lfm2": {"enable_prefix_caching": True},
}
"""The settings of an engine for each model."""

_LEAST: dict[str, int] = {
    **{"gemma3": 288, "mistral": 288, "gemma3 in one group": 288, "lfm2": 288},
    **{"llama4": 288, "llama4 in one group": 288},
}
"""Tokens of the prompt that are a hit at least: it can be resumed at ends of pages, or where there is a state."""

hands_over = pytest.mark.skipif(not HANDS_OVER_STATES, reason="this release of vLLM does not report its pages")
hands_over_nothing = pytest.mark.skipif(HANDS_OVER_STATES, reason="this release of vLLM reports its pages")

ONE_OF_EACH = ["gemma3", "gemma3 in one group", "lfm2"]
MODELS = [*ONE_OF_EACH, pytest.param("mistral", marks=pytest.mark.nightly)]
SAME_IN_BATCHES = ["gemma3", "gemma3 in one group", "mistral"]
"""vLLM itself answers a prompt as it does alone: its states on CPUs come out otherwise beside others."""


@contextmanager
def _engine(name: str, server: str | None, **arguments: Any) -> Iterator[LLM]:
    with engine(group_model_folder(name.split()[0]), server, **{**_ARGUMENTS[name], **arguments}) as llm:
        yield llm


def _expected(name: str, prompts: list[list[int]], **arguments: Any) -> list[list[int]]:
    return answers_without_cache(group_model_folder(name.split()[0]), prompts, **{**_ARGUMENTS[name], **arguments})


def _loaded_tokens(llm: LLM) -> int:
    return sum(counter(llm, f"vllm:kvtier_loaded_tokens_{where}") for where in ("memory", "disk", "tcp"))


def _settle(llm: LLM, server: str) -> None:
    """Until all that was to be saved is."""
    forget_prefixes(llm)  # vLLM lets go of pages that are being saved when they are
    wait_until(lambda: num_held(server) == 0, "nothing held at the server")


@hands_over
@pytest.mark.parametrize("name", [*MODELS, "llama4", "llama4 in one group"])
def test_a_prefix_is_a_hit_for_the_next_engine_and_answers_are_those_without_the_plug_in(
    server: ServerProcess, name: str
) -> None:
    (expected,) = _expected(name, [_PROMPT])
    with _engine(name, server.unix) as llm:
        cold = ask_one(llm, _PROMPT)

    with _engine(name, server.unix) as llm:
        warm = ask_one(llm, _PROMPT)
        num_loaded = _loaded_tokens(llm)

    assert (cold.tokens, cold.num_cached) == (expected, 0)
    assert warm.tokens == expected
    assert warm.num_cached >= _LEAST[name]
    assert num_loaded == warm.num_cached


@hands_over
def test_opaque_pages_of_another_device_are_not_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another processor may keep another order inside a page."""
    with _engine("gemma3", server.unix) as llm:
        ask_one(llm, _PROMPT)
        _settle(llm, server.unix)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(identity, "page_device", lambda: ["cpu", "another processor"])
        with _engine("gemma3", server.unix) as llm:
            assert ask_one(llm, _PROMPT).num_cached == 0
    with _engine("gemma3", server.unix) as llm:
        assert ask_one(llm, _PROMPT).num_cached >= _LEAST["gemma3"]

    assert len(namespaces_at(server.unix)) == 2


@hands_over
def test_opaque_pages_of_another_attention_backend_are_not_found(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backends that vLLM chooses by itself: its config names none."""
    with _engine("gemma3", server.unix) as llm:
        ask_one(llm, _PROMPT)
        _settle(llm, server.unix)

    with monkeypatch.context() as elsewhere:
        chosen = Attention.get_attn_backend
        elsewhere.setattr(Attention, "get_attn_backend", lambda self: type("Other", (chosen(self),), {}))
        with _engine("gemma3", server.unix) as llm:
            assert ask_one(llm, _PROMPT).num_cached == 0

    assert len(namespaces_at(server.unix)) == 2


@hands_over
@pytest.mark.nightly
def test_a_worker_in_a_process_of_its_own_tells_the_scheduler_its_backends(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with _engine("gemma3", server.unix, distributed_executor_backend="mp") as llm:
            ask_one(llm, _PROMPT)
            wait_until(lambda: num_held(server.unix) == 0, "nothing held at the server")

    with _engine("gemma3", server.unix) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.num_cached >= _LEAST["gemma3"]
    assert len(namespaces_at(server.unix)) == 1


@hands_over
@pytest.mark.nightly
@pytest.mark.parametrize("name", SAME_IN_BATCHES)
def test_prompts_that_are_answered_together_and_share_a_prefix(server: ServerProcess, name: str) -> None:
    prompts = [[*_PROMPT[:260], *tokens_of(90, seed=seed)] for seed in range(2, 6)]
    expected = [_expected(name, [prompt])[0] for prompt in prompts]

    with _engine(name, server.unix, max_num_batched_tokens=128) as llm:
        assert [answer.tokens for answer in ask(llm, prompts)] == expected
        _settle(llm, server.unix)
        warm = ask(llm, prompts)

    assert [answer.tokens for answer in warm] == expected
    assert all(answer.num_cached for answer in warm)


@hands_over
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_second_turn_of_a_chat_begins_after_the_first(server: ServerProcess, name: str) -> None:
    with _engine(name, server.unix) as llm:
        answer = ask_one(llm, _PROMPT, max_tokens=40).tokens
    second = [*_PROMPT, *answer, *tokens_of(50, seed=9)]
    (expected,) = _expected(name, [second])

    with _engine(name, server.unix) as llm:
        warm = ask_one(llm, second)

    assert warm.tokens == expected
    assert warm.num_cached >= _LEAST[name]


@hands_over
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_pages_are_given_to_others_while_they_are_saved(server: ServerProcess, name: str) -> None:
    prompts = [tokens_of(200, seed=seed) for seed in range(20, 28)]
    arguments = {"max_num_batched_tokens": 64, "max_num_seqs": 4 if name in SAME_IN_BATCHES else 1}
    expected = _expected(name, prompts, **arguments)

    with _engine(name, server.unix, num_gpu_blocks_override=90, **arguments) as llm:
        first = ask(llm, prompts)
        _settle(llm, server.unix)
        again = ask(llm, prompts)

    assert [answer.tokens for answer in first] == expected
    assert [answer.tokens for answer in again] == expected


@hands_over
@pytest.mark.parametrize("name", ["gemma3", pytest.param("lfm2", marks=pytest.mark.nightly)])
def test_a_load_of_which_a_block_is_lost_is_computed(server: ServerProcess, name: str) -> None:
    (expected,) = _expected(name, [_PROMPT])

    with _engine(name, server.unix) as llm:
        ask_one(llm, _PROMPT)
        _settle(llm, server.unix)
        _lose_some_once_matched(llm, server.unix)
        lossy = ask_one(llm, _PROMPT)
        failed = counter(llm, "vllm:kvtier_failed_loads")
        forget_prefixes(llm)
        again = ask_one(llm, _PROMPT)

    assert lossy.tokens == again.tokens == expected
    assert failed == 1


@hands_over
def test_a_model_with_windows_over_tcp(tmp_path: Path) -> None:
    (expected,) = _expected("gemma3", [_PROMPT])
    with cache_server(tcp=True, folder=tmp_path) as server:
        settings = {"token_file": str(tmp_path / "token")}
        with _engine("gemma3", server.tcp, settings=settings) as llm:
            cold = ask_one(llm, _PROMPT)
            _settle(llm, server.unix)
            warm = ask_one(llm, _PROMPT)

    assert cold.tokens == warm.tokens == expected
    assert warm.num_cached >= _LEAST["gemma3"]


@hands_over_nothing
def test_a_release_that_hands_over_no_states_says_so_and_answers_without_the_cache(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gemma3"
    logger = logging.getLogger("connector under test")
    monkeypatch.setattr(connector, "logger", logger)
    (expected,) = _expected(name, [_PROMPT])
    with caplog.at_level(logging.WARNING, logger.name), _engine(name, server.unix) as llm:
        answers = [ask_one(llm, _PROMPT), ask_one(llm, _PROMPT)]

    assert [answer.tokens for answer in answers] == [expected] * 2
    assert namespaces_at(server.unix) == []
    said = {record.getMessage() for record in caplog.records if record.name == logger.name}
    assert said == {
        "kvtier keeps nothing of this model: this release of vLLM does not report which pages windows and states are in"
    }


@hands_over
def test_only_what_a_window_reaches_is_loaded(server: ServerProcess) -> None:
    page_tokens = 32
    with _engine("gemma3", server.unix, page_tokens=page_tokens) as llm:
        ask_one(llm, _PROMPT)
        _settle(llm, server.unix)
        warm = ask_one(llm, _PROMPT)
        num_bytes = counter(llm, "vllm:kvtier_loaded_bytes")
    (known,) = namespaces_at(server.unix)

    num_pages = warm.num_cached // page_tokens
    window_pages = -(-(WINDOW_TOKENS - 1) // page_tokens)
    assert num_bytes == (num_pages + 3 * window_pages) * known.block_bytes


@hands_over
@pytest.mark.nightly
def test_other_weights_and_other_pages_are_other_blocks(server: ServerProcess) -> None:
    with _engine("gemma3", server.unix) as llm:
        ask_one(llm, _PROMPT)

    with _engine("gemma3", server.unix, page_tokens=64) as llm:
        pages = ask_one(llm, _PROMPT)
    with engine(group_model_folder("gemma3", seed=1), server.unix) as llm:
        weights = ask_one(llm, _PROMPT)

    assert pages.num_cached == weights.num_cached == 0


@hands_over
@pytest.mark.nightly
def test_explain_says_that_pages_are_for_vllm_alone(server: ServerProcess) -> None:
    with _engine("gemma3", server.unix) as llm:
        begin(llm, "asked", _PROMPT)
        drive(llm)
        forget_prefixes(llm)
        command = [sys.executable, "-m", "kvtier", "explain", "asked", "--server", server.unix]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "for vLLM alone" in said
    assert f"a sliding window of {WINDOW_TOKENS} tokens" in said


def _lose_some_once_matched(llm: LLM, server: str) -> None:
    """Blocks that the scheduler has matched are gone when the worker loads them."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    connector_side = vars(connector)["_scheduler"]
    plan_step = connector_side.plan_step

    def plan_and_lose(output: Any) -> Any:
        plan = plan_step(output)
        for number, load in enumerate(plan.loads):
            lost = [bytes(32), *load.hashes[1:]]
            plan.loads[number] = type(load)(**{**_fields(load), "hashes": lost, "leased": None})
        return plan

    connector_side.plan_step = plan_and_lose


def _fields(load: Any) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__dataclass_fields__}
