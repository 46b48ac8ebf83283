"""Latents (MLA) and gated DeltaNet, which vLLM reuses on processors with instructions for bfloat16 alone.

On other processors all but the last test are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm
from vllm import LLM

from kvtier.plugins.vllm.releases import release_of
from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    Answer,
    answers_without_cache,
    ask_one,
    counter,
    engine,
    forget_prefixes,
    namespaces_at,
    tokens_of,
)
from tests.compat.vllm.group_models import group_model_folder

pytestmark = pytest.mark.skipif(
    release_of(vllm.__version__) < (0, 32), reason="these kernels of vLLM were tried with 0.32 alone"
)

_PROMPT = tokens_of(300)
_NUM_REUSED = 288
"""The cached tokens of the prompt: whole pages of 32."""

_ARGUMENTS: dict[str, Any] = {"dtype": "bfloat16", "page_tokens": 32, "enable_prefix_caching": True}

_MODELS = [
    pytest.param(
        "deepseek",
        marks=pytest.mark.skipif(
            not torch.cpu._is_amx_tile_supported(), reason="vLLM reuses latents on processors with AMX only"
        ),
    ),
    pytest.param(
        "qwen3_next",
        marks=pytest.mark.skipif(
            not torch.cpu._is_avx512_bf16_supported(), reason="vLLM runs gated DeltaNet with AVX-512 for bfloat16 only"
        ),
    ),
]


def _cold_and_hit(llm: LLM) -> tuple[Answer, Answer]:
    return ask_one(llm, _PROMPT), ask_one(llm, _PROMPT)


def _loaded_tokens(llm: LLM) -> int:
    return sum(counter(llm, f"vllm:kvtier_loaded_tokens_{where}") for where in ("memory", "disk", "tcp"))


@pytest.mark.parametrize("name", _MODELS)
def test_a_hit_in_the_next_engine_answers_as_vllms_own_hit_does(server: ServerProcess, name: str) -> None:
    """In bfloat16 a hit may answer otherwise than a computed prompt: vLLM rounds elsewhere."""
    folder = group_model_folder(name)
    with engine(folder, **_ARGUMENTS) as llm:
        plain_cold, own_hit = _cold_and_hit(llm)
    assert own_hit.num_cached == _NUM_REUSED

    with engine(folder, server.unix, **_ARGUMENTS) as llm:
        cold, _ = _cold_and_hit(llm)
        forget_prefixes(llm)
        loaded = ask_one(llm, _PROMPT)
    with engine(folder, server.unix, **_ARGUMENTS) as llm:
        warm = ask_one(llm, _PROMPT)
        num_loaded = _loaded_tokens(llm)

    assert (cold.tokens, cold.num_cached) == (plain_cold.tokens, 0)
    assert loaded.tokens == warm.tokens == own_hit.tokens
    assert loaded.num_cached == warm.num_cached == num_loaded == _NUM_REUSED


def test_nothing_is_kept_of_a_model_of_which_vllm_itself_reuses_nothing(server: ServerProcess) -> None:
    """Latents with vLLM's kernels for every processor, which cannot continue a cached prefix."""
    arguments: dict[str, Any] = {"page_tokens": 16, "attention_backend": "CPU_MLA"}
    (expected,) = answers_without_cache(group_model_folder("deepseek"), [_PROMPT], **arguments)

    with engine(group_model_folder("deepseek"), server.unix, **arguments) as llm:
        answers = [ask_one(llm, _PROMPT), ask_one(llm, _PROMPT)]

    assert [(answer.tokens, answer.num_cached) for answer in answers] == [(expected, 0)] * 2
    assert namespaces_at(server.unix) == []
