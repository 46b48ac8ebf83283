"""The engine's greedy tokens are those of transformers, and those of the plain models for quantised weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.models.loading import load_model
from kvtier.testing.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.support.dense import greedy
from tests.unit.models.quantization.test_gptq import save_gptq_model

torch.set_num_threads(1)

NUM_TOKENS = 64
LENGTHS = (300, 1, 2, 15, 16, 17, 64, 129, 257)
UNENDING = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts_of(lengths: tuple[int, ...], *, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def answers(folder: Path, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_space=1 << 23, **settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, UNENDING, progress=False)]


def answer_of_transformers(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    unending = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=None)
    model.generation_config = unending
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=unending)
    return generated[0, len(prompt) :].tolist()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gets_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path, family)
    prompts = prompts_of(LENGTHS)
    expected = [answer_of_transformers(model, prompt) for prompt in prompts]

    found = answers(tmp_path, prompts)

    assert [len(answer) for answer in found] == [NUM_TOKENS] * len(prompts)
    assert found == expected


def test_a_sliding_window_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "mistral", sliding_window=24)
    prompts = prompts_of((5, 23, 24, 25, 90))
    expected = [answer_of_transformers(model, prompt) for prompt in prompts]

    found = answers(tmp_path, prompts, max_num_batched_tokens=40)

    assert found == expected


@pytest.mark.parametrize("family", ["qwen3", "glm"])
def test_fp8_gives_the_tokens_of_the_fp8_model_run_alone(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    prompts = prompts_of((1, 17, 70))
    model = load_model(tmp_path, dtype="float32", device="cpu", quantization="fp8").model
    with torch.inference_mode():
        expected = [greedy(model, torch.tensor(prompt), NUM_TOKENS) for prompt in prompts]

    found = answers(tmp_path, prompts, quantization="fp8", max_num_batched_tokens=32)

    assert found == expected


def test_gptq_gives_the_tokens_of_its_dequantised_weights(tmp_path: Path) -> None:
    folder = save_gptq_model(tmp_path, group_size=32, act_order=True, sym=False)
    prompts = prompts_of((1, 17, 70))
    model = load_model(tmp_path / "plain", dtype="float32", device="cpu").model
    with torch.inference_mode():
        expected = [greedy(model, torch.tensor(prompt), NUM_TOKENS) for prompt in prompts]

    found = answers(folder, prompts, max_num_batched_tokens=32)

    assert found == expected
