"""The program that measures vLLM's engine, with an engine in vLLM's place: what it asks for, and when it forgets."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from benchmarks.peers import vllm_engine

SMALL = ("--model-shape", "small", "--prompts", "3", "--input-tokens", "50", "--outputs", "2", "--rounds", "2")
SWEEP = ("--sweep-prompts", "4", "--sweep-tokens", "40", "--hit-rates", "0", "50", "--ttft-tokens", "70")


class FakeLLM:
    """Notes its settings, how many prompts of which length it was asked, and its resets."""

    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, model, **settings):
        self.settings = settings
        self.events = []
        self.asked = []
        self.made.append(self)

    def generate(self, prompts, params, use_tqdm):
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        self.asked.append(tokens)
        self.events.append((len(tokens), len(tokens[0]), params.max_tokens))
        answer = SimpleNamespace(token_ids=[0] * params.max_tokens)
        return [SimpleNamespace(outputs=[answer]) for _ in tokens]

    def reset_prefix_cache(self):
        self.events.append("reset")
        return True


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs a mode and returns the engine and the result."""
    for name in vllm_engine.ENVIRONMENT:
        monkeypatch.setenv(name, "0")
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = FakeLLM, SimpleNamespace, "0.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(FakeLLM, "made", [])

    def run(*arguments):
        target = tmp_path / "result.json"
        assert vllm_engine.main([*arguments, "--json", str(target)]) == 0
        return FakeLLM.made[0], json.loads(target.read_text())

    return run


@pytest.mark.slow
def test_with_offloading_every_round_starts_with_an_empty_gpu_cache(measured):
    llm, result = measured("offload", *SMALL, *SWEEP)

    assert llm.settings["kv_offloading_backend"] == "native"
    assert llm.events[1:] == ["reset", (3, 50, 2)] * 3 + [(1, 70, 1)] + ["reset", (1, 70, 1)] * 2
    assert result["figures"].keys() == {"cold_n2", "host_hit_n2", "ttft_30k_cold_ms", "ttft_30k_host_hit_ms"}


@pytest.mark.slow
def test_by_default_prompts_repeat_and_the_sweep_starts_over_for_each_hit_rate(measured):
    llm, result = measured("default", *SMALL, *SWEEP, "--set", "max_model_len=99")

    assert llm.settings["max_model_len"] == 99
    assert llm.events[1:] == [(3, 50, 2)] * 3 + [(1, 70, 1)] * 3 + ["reset", (4, 40, 24)] * 2
    assert llm.asked[1] == llm.asked[2]
    shared = [len(set(column)) == 1 for column in zip(*llm.asked[-1], strict=True)]
    assert shared == [True] * 20 + [False] * 20
    assert {"cold_n2", "gpu_hit_n2", "ttft_30k_gpu_hit_ms", "sweep_0", "sweep_50"} <= result["figures"].keys()


def test_small_steps_are_a_setting_of_vllm(measured):
    llm, result = measured("small-steps", *SMALL, *SWEEP)

    assert llm.settings["max_num_batched_tokens"] == 1024
    assert "ttft_30k_cold_ms" not in result["figures"]
