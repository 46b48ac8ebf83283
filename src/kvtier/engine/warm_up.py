"""Runs every kernel of a greedy step once before the first request, on a GPU: none is compiled while somebody waits.

Captured graphs have compiled what they hold. Left are what runs around them, and steps that are too large for them, or
all where there are none: decodes beside prompts, short and long chunks, from the start and behind a long prefix, and
short ones of many requests (`kernels/tuning`). Products are a library's, which has a kernel for each range of sizes:
CUDA loads one, and torch takes memory for its results, when a size first comes, and may let every copy and every other
thread wait meanwhile until the device is idle. So all sizes come here first, the largest before the others: every
number of rows that sample, and for the layers every 64 tokens, which share a kernel.
"""

from __future__ import annotations

import torch

from kvtier.engine.chunk_graphs import MAX_GRAPH_TOKENS
from kvtier.engine.config import EngineConfig
from kvtier.engine.request import Request
from kvtier.engine.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.step import Step, StepRow
from kvtier.kernels.rotation import Rotation
from kvtier.models.model import Model

_SHORT_COUNTS = (2, 8, 64)
_MANY_COUNTS = (2, 8, 16, 64)
_LONG_CONTEXT = 4096
_LAYER_STEP = 64
_MAX_LAYER_STEPS = 128
"""Kernels of products are chosen by how many tiles there are, of 64 tokens or more."""


def compile_kernels(runner: Runner, config: EngineConfig, max_model_len: int) -> None:
    """Steps of zeros in block 0, which nobody has yet."""
    longest = max_model_len - 1
    num_tokens = min(config.max_num_batched_tokens, config.max_num_requests * longest)
    with torch.inference_mode():
        _multiply_head(runner.model, min(config.max_num_requests, num_tokens))
        _multiply_layer(runner.model, num_tokens)
    while num_tokens > MAX_GRAPH_TOKENS:
        _run(runner, _prompts(num_tokens, longest, config.block_size))
        num_tokens = num_tokens * 3 // 4
    most = min(config.max_num_batched_tokens, longest)
    far = min(_LONG_CONTEXT, max_model_len - 1)
    block_tokens = config.block_size
    for count in (*_SHORT_COUNTS, min(most, MAX_GRAPH_TOKENS + 1), most):
        if count > most:
            continue
        for start in (0, max(far - count, 0)):
            _run(runner, [_row(0, start, count, block_tokens)])
    for count in _MANY_COUNTS:
        num_rows = min(config.max_num_requests, most // count)
        if num_rows * count > MAX_GRAPH_TOKENS:
            _run(runner, [_row(slot, max(far - count, 0), count, block_tokens) for slot in range(num_rows)])
    if config.max_num_requests > 1 and most > 2:
        for context in (1, far):
            _run(runner, [_row(0, context - 1, 1, block_tokens), _row(1, 0, most - 1, block_tokens)])


def _multiply_head(model: Model, max_rows: int) -> None:
    """Any number of a step's rows may sample, whatever its size."""
    states = model.embed_tokens.weight.new_zeros(max_rows, model.config.hidden_size)
    for num_rows in range(max_rows, 0, -1):
        model.logits(states[:num_rows])


def _multiply_layer(model: Model, max_tokens: int) -> None:
    """All of the first layer but attention. The others have the same sizes."""

    def no_attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        return query.reshape(query.shape[0], -1)

    step = max(_LAYER_STEP, max_tokens // _MAX_LAYER_STEPS)
    hidden = model.embed_tokens.weight.new_zeros(max_tokens, model.config.hidden_size)
    rope_rows = model.rope.rows(torch.zeros(max_tokens, dtype=torch.int64, device=hidden.device))
    for num_tokens in range(max_tokens, 0, -step):
        model.layers[0](hidden[:num_tokens], None, rope_rows[:num_tokens], no_attention)


def _prompts(num_tokens: int, longest: int, block_tokens: int) -> list[StepRow]:
    counts = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
    return [_row(slot, 0, count, block_tokens) for slot, count in enumerate(counts)]


def _row(slot: int, start: int, count: int, block_tokens: int) -> StepRow:
    request = Request(f"warm-up-{slot}", [0] * (start + count), SamplingParams(temperature=0.0), max_tokens=1)
    request.blocks.ids = [0] * -(-(start + count) // block_tokens)
    request.num_in_flight = 1
    request.slot = slot
    return StepRow(request, start, count, True)


def _run(runner: Runner, rows: list[StepRow]) -> None:
    runner.submit(Step(rows, [], sum(row.count for row in rows))).wait()
    for row in rows:
        runner.forget(row.request)
