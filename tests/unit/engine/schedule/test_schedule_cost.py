"""What a step costs on the host, without the device: benchmarks measure its time, here its calls are counted."""

from __future__ import annotations

import statistics
from collections import deque

import pytest

from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.block_manager import BlockManagerName, make_block_manager
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.engine.schedule.step import Step
from kvtier.transfer.transfer import NoTransfer
from tests.support.call_count import counted_calls
from tests.support.engine_building import NAMESPACE, prompt_of

NUM_REQUESTS = 64
NUM_STEPS = 300
MAX_CALLS_PER_ROW = 40  # twice what there are


@pytest.mark.parametrize("manager", ["prefix_caching", "yoco"])
def test_a_step_of_64_decodes_is_scheduled_and_hashed_by_few_calls(manager: BlockManagerName) -> None:
    blocks = make_block_manager(manager, 8192, 16, NAMESPACE)
    scheduler = Scheduler(blocks, max_num_requests=NUM_REQUESTS, max_num_batched_tokens=1 << 20, transfer=NoTransfer())
    for seed in range(NUM_REQUESTS):
        prompt = prompt_of(200 + seed, seed=seed)
        scheduler.add(Request(str(seed), prompt, SamplingParams(), max_tokens=NUM_STEPS * 2))
    under_way: deque[Step] = deque()
    num_calls = []

    for number in range(NUM_STEPS):
        with counted_calls() as calls:
            step = scheduler.schedule()
            scheduler.submitted(step)
        num_calls.append(len(calls))
        under_way.append(step)
        if len(under_way) > 2:
            _give_tokens(under_way.popleft(), number)

    assert len(step.rows) == NUM_REQUESTS
    assert statistics.median(num_calls[10:]) <= MAX_CALLS_PER_ROW * NUM_REQUESTS


def _give_tokens(step: Step, token: int) -> None:
    for row in step.rows:
        row.request.num_in_flight -= 1
        row.request.tokens.append(token)
