"""The engine on a GPU: the kernels agree with their twins in plain torch, and every block of a huge pool is as good."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.engine import Engine
from kvtier.engine.naive_blocks import NaiveBlocks
from kvtier.engine.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.kernels.backend import Backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


def _engine(folder: Path, **settings: object) -> Engine:
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    values = {"device": "cuda", "load_format": "dummy", "max_model_len": 4096, "kv_cache_space": 1 << 30, **settings}
    return Engine(EngineConfig(model=str(folder), **values))  # type: ignore[arg-type]


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(32000) for _ in range(length)] for length in lengths]


def _generate(engine: Engine, prompts: list[list[int]], params: SamplingParams = _GREEDY) -> list[list[int]]:
    requests = [engine.add(f"r{number}", prompt, params)[0] for number, prompt in enumerate(prompts)]
    while engine.has_requests:
        engine.step()
    for number in range(len(prompts)):
        engine.forget(f"r{number}")
    return [request.output_tokens for request in requests]


def _agreement(some: list[list[int]], others: list[list[int]]) -> float:
    """The share of answers' tokens before they first differ: in bfloat16 a tie may go either way."""
    agreeing = total = 0
    for one, other in zip(some, others, strict=True):
        total += len(one)
        agreeing += next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return agreeing / total


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_those_of_a_plain_torch_run(tmp_path: Path, dtype: str) -> None:
    prompts = _prompts((1, 15, 16, 17, 130, 700, 1500, 3000))
    engine = _engine(tmp_path, dtype=dtype, max_num_batched_tokens=1024)
    found = _generate(engine, prompts)
    engine.runner = Runner(
        engine.loaded.model, engine.arena, max_num_requests=128, max_model_len=4096, backend=Backend.TORCH
    )
    engine.scheduler.blocks = NaiveBlocks(
        engine.arena.num_blocks, 16, engine.loaded.namespace_fields(engine.arena.layout).digest()
    )
    expected = _generate(engine, prompts)
    assert _agreement(found, expected) >= (1.0 if dtype == "float32" else 0.5)


@pytest.mark.parametrize("schedule", ["sync", "async-1", "async-2", "async-3"])
@pytest.mark.parametrize("manager", ["naive", "disable_prefix_caching", "prefix_caching", "yoco"])
def test_every_manager_and_schedule_gives_the_same_tokens(tmp_path: Path, manager: str, schedule: str) -> None:
    prompts = _prompts((33, 100, 257, 1000))
    prompts += [prompts[2][:200] + prompts[1], list(prompts[3])]
    expected = _generate(_engine(tmp_path, dtype="float32", block_manager="naive", schedule="sync"), prompts)
    engine = _engine(tmp_path, dtype="float32", block_manager=manager, schedule=schedule, max_num_batched_tokens=300)
    assert _generate(engine, prompts) == expected
    assert _generate(engine, prompts) == expected


def test_the_last_blocks_of_a_pool_of_64_gib_are_as_good_as_the_first(tmp_path: Path) -> None:
    engine = _engine(tmp_path, block_manager="naive", kv_cache_space=66 << 30)
    assert engine.arena.nbytes > 64 << 30
    prompts = _prompts((500, 900, 1700))
    first = _generate(engine, prompts)
    blocks = engine.scheduler.blocks
    assert isinstance(blocks, NaiveBlocks)
    blocks._free_ids.reverse()
    request = engine.add("where", prompts[0], _GREEDY)[0]
    engine.step()
    assert min(request.blocks.ids) > engine.arena.num_blocks - 100, "it lies at the end"
    engine.abort("where")
    engine.forget("where")
    blocks._free_ids.sort()
    assert _generate(engine, prompts) == first


def test_a_step_waits_for_nothing(tmp_path: Path) -> None:
    engine = _engine(tmp_path, schedule="async-2")
    prompts = _prompts((50, 300, 20))
    _generate(engine, prompts)  # kernels are compiled, caches are warm
    for number, prompt in enumerate(_prompts((64, 90, 10))):
        engine.add(f"q{number}", prompt, _GREEDY)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            step = engine.scheduler.schedule()
            engine._under_way.append(engine.runner.submit(step))
            engine.scheduler.submitted(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.has_requests:
        engine.step()
