"""A prefix computed by vLLM is a hit in kvtier's own engine for the same checkpoint, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.engine.llm import LLM
from kvtier.engine.sampling_params import SamplingParams
from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    Answer,
    answers_without_cache,
    ask_one,
    engine,
    model_folder,
    namespaces_at,
    tokens_of,
    wait_until_stored,
)

_PROMPT = tokens_of(300)


def _ask_our_engine(model: Path, server: ServerProcess, dtype: str, cache_salt: str = "") -> Answer:
    with LLM(
        str(model), device="cpu", dtype=dtype, kv_cache_space=1 << 24, cache_server=server.unix, always_load=True
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([_PROMPT], params, progress=False, cache_salt=cache_salt)
        wait_until_stored(server.unix, _PROMPT, dtype=dtype, count=288)
    answer = output.outputs[0]
    return Answer(list(answer.token_ids), sum(answer.cached_tokens.values()))


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2", "float32"), ("qwen2", "float16")])
def test_our_engine_hits_what_vllm_stored(server: ServerProcess, family: str, dtype: str) -> None:
    model = model_folder(family)
    with engine(model, server.unix, dtype=dtype) as llm:
        by_vllm = ask_one(llm, _PROMPT)
        wait_until_stored(server.unix, _PROMPT, dtype=dtype)

    by_us = _ask_our_engine(model, server, dtype)

    assert by_us.num_cached == 288
    assert by_us.tokens == by_vllm.tokens
    assert len(namespaces_at(server.unix)) == 1


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2", "float16")])
def test_vllm_hits_what_our_engine_stored(server: ServerProcess, family: str, dtype: str) -> None:
    model = model_folder(family)
    by_us = _ask_our_engine(model, server, dtype)

    with engine(model, server.unix, dtype=dtype) as llm:
        by_vllm = ask_one(llm, _PROMPT)

    (expected,) = answers_without_cache(model, [_PROMPT], dtype=dtype)
    assert (by_us.num_cached, by_vllm.num_cached) == (0, 288)
    assert by_vllm.tokens == expected
    assert len(namespaces_at(server.unix)) == 1
