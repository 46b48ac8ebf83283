"""Runs every attention kernel once before the first request, on a GPU: none of them is compiled while somebody waits.

A prompt's last few tokens behind a cached prefix, and decodes beside prompts, have kernels of their own for every size
of their tiles and every number of splits (`kernels/tuning`).
"""

from __future__ import annotations

from kvtier.engine.config import EngineConfig
from kvtier.engine.request import Request
from kvtier.engine.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.step import Step, StepRow
from kvtier.kernels.tuning import MAX_SPLITS, MIN_SPLIT_TOKENS

_MAX_QUERY_TOKENS = 128


def compile_kernels(runner: Runner, config: EngineConfig, max_model_len: int) -> None:
    """Steps of zeros in block 0, which nobody has yet."""
    most = min(config.max_num_batched_tokens, max_model_len - 1)
    count = 2
    while count <= min(_MAX_QUERY_TOKENS, most):
        runner.submit(_step([_row(0, 0, count, config.block_size)])).wait()
        count *= 2
    context = MIN_SPLIT_TOKENS
    while context <= min(MIN_SPLIT_TOKENS * MAX_SPLITS, max_model_len) and config.max_num_requests > 1 and most > 2:
        decode, prefill = _row(0, context - 1, 1, config.block_size), _row(1, 0, 2, config.block_size)
        runner.submit(_step([decode, prefill])).wait()
        context *= 2


def _row(slot: int, start: int, count: int, block_tokens: int) -> StepRow:
    request = Request(f"warm-up-{slot}", [0] * (start + count), SamplingParams(temperature=0.0), max_tokens=1)
    request.blocks.ids = [0] * -(-(start + count) // block_tokens)
    request.slot = slot
    return StepRow(request, start, count, False)


def _step(rows: list[StepRow]) -> Step:
    return Step(rows, [], sum(row.count for row in rows))
