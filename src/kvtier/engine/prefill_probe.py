"""Measures how fast prompts are computed before the first one comes, so that the first decision is an informed one."""

from __future__ import annotations

from kvtier.engine.config import EngineConfig
from kvtier.engine.request import Request
from kvtier.engine.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.step import Step, StepRow
from kvtier.engine.step_timer import StepTimer

_SIZES = (32, 256)
_NUM_TIMES = 3


def measure_prefill(runner: Runner, timer: StepTimer, config: EngineConfig, max_model_len: int) -> None:
    """Compute a few prompts of zeros; nobody reads what they leave in the arena."""
    for size in _SIZES:
        count = min(size, config.max_num_batched_tokens, max_model_len - 1)
        for number in range(_NUM_TIMES):
            step = _probe(count, config.block_size)
            if number:  # the first one warms up
                timer.start()
            submitted = runner.submit(step)
            if number:
                timer.stop(step)
            submitted.wait()
            runner.forget(step.rows[0].request)


def _probe(count: int, block_tokens: int) -> Step:
    request = Request("probe", [0] * count, SamplingParams(temperature=0.0), max_tokens=1)
    request.blocks.ids = list(range(-(-count // block_tokens)))
    request.num_in_flight = 1
    return Step([StepRow(request, 0, count, True)], [], count)
