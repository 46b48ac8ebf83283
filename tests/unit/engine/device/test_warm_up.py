"""Warming up runs steps of every size and leaves nothing behind. On a CPU, with the torch twins of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.device.warm_up import compile_kernels
from kvtier.engine.engine import Engine
from kvtier.engine.sampling_params import SamplingParams
from kvtier.testing.tiny_models import FAMILIES, save_tiny_model


def _answer(engine: Engine) -> list[int]:
    (request,) = engine.add("one", list(range(40)), SamplingParams(max_tokens=4, temperature=0.0))
    while engine.has_requests:
        engine.step()
    engine.forget("one")
    return request.output_tokens


def test_an_engine_answers_the_same_after_warming_up(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", max_position_embeddings=2048)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", kv_cache_space=4 << 20, max_num_requests=130, max_num_batched_tokens=1500
    )
    cold, warm = Engine(config), Engine(config)
    compile_kernels(warm.runner, config, warm.max_model_len)

    assert _answer(warm) == _answer(cold)


@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_all_sizes_come_before_the_first_request(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest first: what they need is there for all others."""
    save_tiny_model(tmp_path, family)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", kv_cache_space=4 << 20, max_num_requests=7, max_num_batched_tokens=200
    )
    engine = Engine(config)
    heads: list[int] = []
    layers: list[int] = []
    model = engine.runner.model
    logits, first_layer = model.logits, model.layers[0].forward

    def note_logits(hidden: torch.Tensor) -> torch.Tensor:
        heads.append(len(hidden))
        return logits(hidden)

    def note_layer(hidden: torch.Tensor, *others: Any) -> Any:
        layers.append(len(hidden))
        return first_layer(hidden, *others)

    monkeypatch.setattr(model, "logits", note_logits)
    monkeypatch.setattr(model.layers[0], "forward", note_layer)
    compile_kernels(engine.runner, config, engine.max_model_len)

    assert heads[:7] == [7, 6, 5, 4, 3, 2, 1]
    assert layers[:4] == [200, 136, 72, 8]
    assert len(_answer(engine)) == 4


def test_one_request_at_a_time_and_few_tokens_need_no_mixed_steps(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    config = EngineConfig(
        model=str(tmp_path), device="cpu", kv_cache_space=4 << 20, max_num_requests=1, max_num_batched_tokens=2
    )
    engine = Engine(config)
    compile_kernels(engine.runner, config, engine.max_model_len)

    assert len(_answer(engine)) == 4
