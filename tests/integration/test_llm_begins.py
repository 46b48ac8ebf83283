"""An `LLM` with many prompts begins with a step's worth of them, while it takes in the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.testing.tiny_models import save_tiny_model

torch.set_num_threads(1)

_GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
_PROMPTS = [list(range(first, first + 40)) for first in range(1, 6)]


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
@pytest.mark.parametrize("takes_long", [True, False])
def test_the_first_step_does_not_wait_for_all_prompts_if_they_take_long(
    tmp_path: Path, schedule: str, takes_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.engine.llm._WORTH_BEGINNING_S", 0.0 if takes_long else 1e9)
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_space": 1 << 20}
    with LLM(str(tmp_path), schedule=schedule, max_num_batched_tokens=64, **settings) as llm:
        alone = [llm.generate([prompt], _GREEDY)[0].outputs[0].token_ids for prompt in _PROMPTS]
        acts: list[str] = []
        for name in ("add", "step"):
            act = getattr(llm.engine, name)
            monkeypatch.setattr(llm.engine, name, lambda *args, name=name, act=act: (acts.append(name), act(*args))[1])

        together = [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, _GREEDY)]

    assert together == alone
    first = ["add", "add", "step", "add", "add", "add"] if takes_long else ["add"] * 5
    assert acts[: len(first)] == first
    assert set(acts[len(first) :]) == {"step"}


def test_prompts_of_which_one_is_wrong_are_answered_all_the_same(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_cache_space=1 << 20, max_num_batched_tokens=64) as llm:
        outputs = llm.generate([*_PROMPTS[:2], [], *_PROMPTS[2:]], _GREEDY)

        assert outputs[2].error is not None
        answered = [output for output in outputs if output.error is None]
        assert [output.prompt_token_ids for output in answered] == _PROMPTS
        assert all(len(output.outputs[0].token_ids) == 3 for output in answered)
