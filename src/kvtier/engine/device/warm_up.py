"""Runs every kernel of a greedy step once before the first request, on a GPU: none is compiled while somebody waits.

Captured graphs have compiled what they hold. Left are what runs around them, and steps that no graph runs: large ones,
some of those behind arrivals, and all where there are none. How attention is cut there (`kernels/tuning`) depends on
how many queries a row has, on how many rows there are, and on how long the longest is, for the decodes of a step and
for its other rows by themselves. Every way to cut it comes here, whether or not a graph would run such a step.

Products are a library's, which has a kernel for each range of sizes: CUDA loads one, and torch takes memory for its
results, when a size first comes, and may let every copy and every other thread wait meanwhile until the device is idle.
So all sizes come here first, the largest before the others: every number of rows that sample, and for the layers every
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
from kvtier.kernels.rotation import Rotation
from kvtier.models.model import Model

_MAX_COUNT = 160
"""Queries of a row: the tiles of attention double, up to 128. From 192 on KV is gathered."""

_MORE_ROWS = 4
"""By this the numbers of rows grow. No range of them that is cut alike is smaller."""

_MEDIUM_CONTEXT, _LONG_CONTEXT = 600, 4096
"""Keys are cut into a few parts, and into many."""

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
    counts = [count for count in (*_counts(runner), most) if count <= most]
    kinds = dict.fromkeys(kind for count in counts for kind in _kinds(runner, config, longest, count))
    for num_rows, start, num_queries in kinds:
        _run(runner, [_row(slot, start, num_queries, config.block_size) for slot in range(num_rows)])


def _counts(runner: Runner) -> list[int]:
    """How many queries a row may have: one number for each kind of tiles, and of what windows leave to be cut."""
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
    """Rows of `count` queries, how many and where they start: one without much before it, and many that are long."""
    max_rows = min(config.max_num_requests, config.max_num_batched_tokens // count)
    contexts = [(1, 0), (1, _MEDIUM_CONTEXT), *((num_rows, _LONG_CONTEXT) for num_rows in _numbers(max_rows))]
    many = -(-tuning.MANY_DECODES // runner.arena.layout.kv_heads)
    if count == 1 and many <= max_rows:
        contexts += [(many, 0), (many, _LONG_CONTEXT)]
    for num_rows, context in contexts:
        yield num_rows, max(min(context, longest) - count, 0), count


def _numbers(most: int) -> list[int]:
    """Of rows: from 1 to `most`."""
    numbers = []
    number = 1
    while number < most:
        numbers.append(number)
        number *= _MORE_ROWS
    return [*numbers, most]


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
    runner.submit(Step(rows, [], sum(row.count for row in rows)), uses_graphs=False).wait()
    for row in rows:
        runner.forget(row.request)
