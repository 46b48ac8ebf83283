"""The cost of scheduling and hashing in a step, without a device: the scheduler runs on random tokens."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from kvtier import SamplingParams
from kvtier.blocks.namespace import Namespace
from kvtier.engine.schedule.block_manager import BlockManagerName, make_block_manager
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.scheduler import Scheduler
from kvtier.transfer.transfer import NoTransfer

NUM_REQUESTS = 64
_BLOCK_TOKENS = 16
_PROMPT_TOKENS = 1000
_NUM_WINDOWS = 32
_VOCAB_SIZE = 50_000


@dataclass(frozen=True)
class ScheduleCost:
    """Milliseconds. `step_ms` is the median over runs of 16 steps, in which every request fills one block."""

    step_ms: float
    p99_ms: float
    admit_ms: float


def measure_schedule(manager: BlockManagerName) -> ScheduleCost:
    """Decode steps of 64 running requests of at least a thousand tokens; `admit_ms` is for admitting a prompt."""
    dice = random.Random(7)
    num_outputs = _BLOCK_TOKENS * _NUM_WINDOWS + 1
    num_blocks = NUM_REQUESTS * (-(-(_PROMPT_TOKENS + num_outputs) // _BLOCK_TOKENS) + 2)
    scheduler = Scheduler(
        make_block_manager(manager, num_blocks, _BLOCK_TOKENS, Namespace(bytes(32))),
        max_num_requests=NUM_REQUESTS,
        max_num_batched_tokens=1 << 20,
        transfer=NoTransfer(),
    )
    params = SamplingParams(max_tokens=num_outputs, temperature=0.0)
    for number in range(NUM_REQUESTS):
        tokens = dice.choices(range(_VOCAB_SIZE), k=_PROMPT_TOKENS + number % _BLOCK_TOKENS)
        scheduler.add(Request(f"request-{number}", tokens, params, max_tokens=num_outputs))
    admitted_ms = _step_ms(scheduler, dice)
    times = [_step_ms(scheduler, dice) for _ in range(_BLOCK_TOKENS * _NUM_WINDOWS)]
    windows = [statistics.fmean(times[start : start + _BLOCK_TOKENS]) for start in range(0, len(times), _BLOCK_TOKENS)]
    return ScheduleCost(
        step_ms=statistics.median(windows),
        p99_ms=statistics.quantiles(times, n=100)[-1],
        admit_ms=admitted_ms / NUM_REQUESTS,
    )


def _step_ms(scheduler: Scheduler, dice: random.Random) -> float:
    """One step of all requests, with tokens known at once. Only the scheduler's time counts."""
    started_at = time.perf_counter()
    step = scheduler.schedule()
    scheduler.submitted(step)
    elapsed = time.perf_counter() - started_at
    assert sum(row.samples for row in step.rows) == NUM_REQUESTS
    for row in step.rows:
        row.request.tokens.append(dice.randrange(_VOCAB_SIZE))
        row.request.num_in_flight -= 1
    return 1000 * elapsed
