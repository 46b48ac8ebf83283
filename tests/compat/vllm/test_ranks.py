"""Tensor parallelism: what engines with different numbers of ranks store is the same."""

from __future__ import annotations

import pytest

from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    answers_without_cache,
    ask,
    ask_one,
    engine,
    model_folder,
    namespaces_at,
    num_held,
    tokens_of,
    wait_until,
    wait_until_stored,
)


def test_two_ranks_hit_what_one_stored_and_one_what_two_stored(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens_of(300, seed=seed) for seed in (1, 2)]
    expected = answers_without_cache(model_folder(), prompts)
    with engine(model_folder(), server.unix) as llm:
        ask_one(llm, prompts[0])
        wait_until_stored(server.unix, prompts[0])

    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with engine(model_folder(), server.unix, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
            by_two = ask(llm, prompts)
            wait_until_stored(server.unix, prompts[1])
            wait_until(lambda: num_held(server.unix) == 0, "everything given back")
            wait_until(llm.reset_prefix_cache, "vLLM's prefix cache empty")
            again = ask_one(llm, prompts[1])

    with engine(model_folder(), server.unix) as llm:
        by_one = ask_one(llm, prompts[1])

    assert [answer.tokens for answer in by_two] == expected
    assert [answer.num_cached for answer in by_two] == [288, 0]
    assert (again.tokens, again.num_cached) == (expected[1], 288)
    assert (by_one.tokens, by_one.num_cached) == (expected[1], 288)
    assert len(namespaces_at(server.unix)) == 1
