"""Runs every kernel of a greedy step once on a GPU, so that none is compiled once requests wait.

Captured graphs have compiled what they hold. That leaves what runs around them, and steps that no graph runs: large
ones, some behind arrivals, and all steps if there are no graphs. How attention is cut there (`kernels/tuning`) depends
on how many queries a row has, how many rows there are, and how long the longest is, separately for the decodes of a
step and for its other rows. Every way to cut it occurs here, whether or not a graph would run such a step.

Products are a library's, which has a kernel for each range of sizes. When a size first occurs, CUDA loads its kernel,
and torch takes memory for the results; both may make every copy and every other thread wait until the device is idle.
So all sizes occur here first, the largest before the others: every number of rows that sample, and for the layers every
64 tokens, which share a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier.engine.config import EngineConfig
from kvtier.engine.device.chunk_graphs import MAX_GRAPH_TOKENS
from kvtier.engine.device.runner import Runner
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.kernels import tuning
from kvtier.kernels.backend import forbid_for
from kvtier.kernels.rotation import Rotation
from kvtier.models.model import Model

_MAX_COUNT = 160
"""Limit on the queries of a row: the tiles of attention double, up to 128. From 192 on, KV is gathered."""

_MORE_ROWS = 4
"""Factor between the numbers of rows that are tried. No range of them that is cut alike is smaller."""

_MEDIUM_CONTEXT, _LONG_CONTEXT = 600, 4096
"""Contexts whose keys are cut into a few parts, and into many."""

_LAYER_STEP = 64
_MAX_LAYER_STEPS = 128
"""Kernels of products are chosen by the number of tiles, of 64 tokens or more."""


def compile_kernels(runner: Runner, config: EngineConfig, max_model_len: int) -> None:
    """Run steps of zeros in block 0, which is not in use yet."""
    longest = max_model_len - 1
    num_tokens = min(config.max_num_batched_tokens, config.max_num_requests * longest)
    with torch.inference_mode():
        _multiply_head(runner.model, min(config.max_num_requests, num_tokens))
        _multiply_layer(runner.model, num_tokens)
        _forbid(runner.model)
    while num_tokens > MAX_GRAPH_TOKENS:
        _run(runner, _prompts(num_tokens, longest, config.block_size))
        num_tokens = num_tokens * 3 // 4
    most = min(config.max_num_batched_tokens, longest)
    counts = [count for count in (*_counts(runner), most) if count <= most]
    kinds = dict.fromkeys(kind for count in counts for kind in _kinds(runner, config, longest, count))
    for num_rows, start, num_queries in kinds:
        _run(runner, [_row(slot, start, num_queries, config.block_size) for slot in range(num_rows)])


def _counts(runner: Runner) -> list[int]:
    """How many queries a row may have: one number for each kind of tiles, and of keys left to cut by windows."""
    layout, group = runner.arena.layout, runner.model.config.num_heads // runner.arena.layout.kv_heads
    windows = sorted({window for window in runner.model.config.windows if window is not None})
    counts: dict[tuple[object, ...], int] = {}
    reaching = {tuning.MIN_SPLIT_TOKENS * parts - window + 1 for parts in tuning.NEXT_KINDS for window in windows}
    for count in sorted({*range(1, _MAX_COUNT + 1), *(count for count in reaching if count > 0)}):
        tiles = tuning.attention_tiles(
            group=group, head_dim=layout.head_dim, itemsize=layout.itemsize, max_query_tokens=count, num_rows=1
        )
        cuts = tuple(tuning.kind_of_splits((window + count - 1) // tuning.MIN_SPLIT_TOKENS) for window in windows)
        counts.setdefault((tiles, group * count <= tiles.rows, count == 1, cuts), count)
    return list(counts.values())


def _kinds(runner: Runner, config: EngineConfig, longest: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Rows of `count` queries, as (number of rows, start, `count`): one with little before it, and many long ones."""
    max_rows = min(config.max_num_requests, config.max_num_batched_tokens // count)
    contexts = [(1, 0), (1, _MEDIUM_CONTEXT), *((num_rows, _LONG_CONTEXT) for num_rows in _numbers(max_rows))]
    many = -(-tuning.MANY_DECODES // runner.arena.layout.kv_heads)
    if count == 1 and many <= max_rows:
        contexts += [(many, 0), (many, _LONG_CONTEXT)]
    for num_rows, context in contexts:
        yield num_rows, max(min(context, longest) - count, 0), count


def _numbers(most: int) -> list[int]:
    """Numbers of rows, from 1 to `most`."""
    numbers = []
    number = 1
    while number < most:
        numbers.append(number)
        number *= _MORE_ROWS
    return [*numbers, most]


def _multiply_head(model: Model, max_rows: int) -> None:
    """Compute the head for every number of rows: any of a step's rows may sample."""
    states = model.embed_tokens.weight.new_zeros(max_rows, model.config.hidden_size)
    for num_rows in range(max_rows, 0, -1):
        model.logits(states[:num_rows])


def _forbid(model: Model) -> None:
    """Forbid no token, in the dtypes in which requests with a grammar are sampled."""
    logits = model.logits(model.embed_tokens.weight.new_zeros(1, model.config.hidden_size))
    rows = torch.zeros(1, dtype=torch.int64, device=logits.device)
    words = torch.full((1, -(-logits.shape[-1] // 32)), -1, dtype=torch.int32, device=logits.device)
    for dtype in {logits.dtype, torch.float32}:
        forbid_for(logits)(logits.to(dtype), rows, words)


def _multiply_layer(model: Model, max_tokens: int) -> None:
    """Run the first layer without its attention. The other layers have the same sizes."""

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
    runner.submit(Step(rows, [], sum(row.count for row in rows)), uses_graphs=False).wait()
    for row in rows:
        runner.forget(row.request)
