"""A step that is broken off leaves an engine that answers rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.device.runner import Runner, Submitted
from kvtier.engine.schedule.step import Step
from kvtier.errors import ConfigError
from kvtier.testing.tiny_models import save_tiny_model

torch.set_num_threads(1)

_GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_PROMPTS = [list(range(1, 101)), list(range(1, 60)), list(range(50, 120))]


class _InterruptedRunner(Runner):
    """The first steps go well; then one is broken off before it has computed anything."""

    num_left = 0

    def submit(self, step: Step, constrain: object = None) -> Submitted:
        self.num_left -= 1
        if not self.num_left:
            raise KeyboardInterrupt
        return super().submit(step)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["sync", "async-2"])
@pytest.mark.parametrize("manager", ["naive", "prefix_caching", "yoco"])
def test_after_an_interrupt_nothing_is_served_that_was_never_computed(
    tmp_path: Path, manager: str, schedule: str, num_steps: int
) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_space": 1 << 20, "max_num_batched_tokens": 64}
    with LLM(str(tmp_path), block_manager=manager, schedule=schedule, **settings) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, _GREEDY)]
    with LLM(str(tmp_path), block_manager=manager, schedule=schedule, **settings) as llm:
        engine = llm.engine
        runner = _InterruptedRunner(
            engine.loaded.model, engine.arena, max_num_requests=128, max_model_len=engine.max_model_len
        )
        runner.num_left = num_steps
        engine.runner = runner
        with pytest.raises(KeyboardInterrupt):
            llm.generate(_PROMPTS, _GREEDY)
        assert not engine.has_requests
        for _ in range(2):
            answers = [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, _GREEDY)]
            assert answers == expected
        blocks = engine.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks


def test_a_closed_llm_says_so(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    llm = LLM(str(tmp_path), device="cpu", kv_cache_space=1 << 20)
    llm.close()
    with pytest.raises(ConfigError, match="this LLM is closed"):
        llm.generate([[1, 2]])
