"""Measures how fast prompts are computed before the first one arrives, so that the first decision is an informed one.

Short steps show the cost of a step, long ones that of a token, and those far into a prompt that of attention: a load of
a long prompt must not look slow because the cost of computing was unknown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kvtier.engine.config import EngineConfig
from kvtier.engine.device.runner import Runner
from kvtier.engine.device.step_timer import StepTimer
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow

_SIZES = (32, 256, 1024)
_FAR_TOKENS = 1024
_NUM_TIMES = 3
_LONG_S = 0.1
"""After a size whose steps all take this long, no larger one is tried: start-up must not wait for it. One step that was
held up says nothing."""


def measure_prefill(
    runner: Runner,
    timer: StepTimer,
    config: EngineConfig,
    max_model_len: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Compute a few parts of prompts of zeros in block 0, which is not read afterwards."""
    most = min(config.max_num_batched_tokens, max_model_len - 1)
    parts = [(0, count) for count in sorted({min(size, most) for size in _SIZES})]
    count = min(most, _FAR_TOKENS)
    parts += [(start, count) for start in (max_model_len // 8, max_model_len - count) if start > count]
    for start, count in parts:
        fastest_s = math.inf
        for number in range(_NUM_TIMES):
            began_at = clock()
            step = _probe(start, count, config.block_size)
            if number:  # the first one warms up
                timer.start()
            submitted = runner.submit(step)
            if number:
                timer.stop(step)
            submitted.wait()
            runner.forget(step.rows[0].request)
            if number:
                fastest_s = min(fastest_s, clock() - began_at)
        if fastest_s > _LONG_S:
            return


def _probe(start: int, count: int, block_tokens: int) -> Step:
    request = Request("probe", [0] * (start + count), SamplingParams(temperature=0.0), max_tokens=1)
    request.blocks.ids = [0] * -(-(start + count) // block_tokens)
    request.num_in_flight = 1
    return Step([StepRow(request, start, count, True)], [], count)
