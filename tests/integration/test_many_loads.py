"""Many prompts at once that a tier has: they are loaded, though each waits for the others and one is soon computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvtier import SamplingParams
from kvtier.memory.mapped import MappedArena
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.transfer.copier import Copies, Mark
from kvtier.transfer.copiers.host_copier import HostCopier
from tests.support.tiered_engines import BLOCK_BYTES, cached, full_blocks, open_engine, settled, tokens

torch.set_num_threads(1)

NUM_PROMPTS = 100
PROMPT_TOKENS = 200
LOAD_S = 0.02
COMPUTE_S = 1.0
"""The time to compute one prompt: fifty times its load, and half of all loads together."""


def test_prompts_that_wait_for_each_others_loads_are_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = threading.Lock()
    at_once = HostCopier.load

    def one_by_one(
        self: HostCopier, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark
    ) -> Copies:
        with bus:
            time.sleep(LOAD_S)
        return at_once(self, arena, offsets, places, after)

    monkeypatch.setattr(HostCopier, "load", one_by_one)
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    prompts = [tokens(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    room = {"kv_cache_space": 4 * NUM_PROMPTS * 16 * BLOCK_BYTES, "swap_space": 4 * NUM_PROMPTS * 16 * BLOCK_BYTES}
    with open_engine(
        tmp_path, block_manager="disable_prefix_caching", max_num_requests=NUM_PROMPTS, always_load=False, **room
    ) as llm:
        first = llm.generate(prompts, params, progress=False)
        settled(llm)
        assert llm.engine.transfer.traffic is not None
        speeds = llm.engine.transfer.traffic.decision.speeds
        monkeypatch.setattr(speeds, "prefill_s", lambda start, count, chunk: count * COMPUTE_S / PROMPT_TOKENS)
        for _ in range(2):
            again = llm.generate(prompts, params, progress=False)

            found = [sum(cached(output.outputs[0]).values()) for output in again]
            assert found == [full_blocks(prompt) for prompt in prompts]
            assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in first]
