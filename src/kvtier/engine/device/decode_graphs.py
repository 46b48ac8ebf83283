"""Decode steps as CUDA graphs: one launch instead of a thousand. Owned by the engine's thread.

A graph reads its inputs from fixed addresses and has a fixed number of rows, so steps are padded to the next size;
padding rows read and write nothing. Graphs share their memory: the next run overwrites the result of the last one.

A step whose KV is still arriving, a group of layers at a time, has one graph for each group, so that the first layers
are computed while the last arrive.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.paged_batch import DecodeBuffers, PagedArrays, PagedBatch
from kvtier.transfer.copier import Arrival

_SIZES = (
    *range(1, 8),
    *range(8, 16, 2),
    *range(16, 32, 4),
    *range(32, 64, 8),
    *range(64, 256, 16),
    *range(256, 512, 32),
    *range(512, 1025, 64),
)
"""With very few rows, attention is cut by the rows of the graph, padding included: so each such number has its own."""

MAX_GRAPH_ROWS = _SIZES[-1]
_NUM_WARM_UPS = 2


class Forward(Protocol):
    """Hidden states of the tokens of a batch. Each layer's attention waits for that layer of all `arrivals`."""

    def __call__(self, tokens: torch.Tensor, batch: PagedBatch, arrivals: Sequence[Arrival] = ()) -> torch.Tensor: ...


class DecodeGraphs:
    """Graphs for up to `max_rows` rows of up to `max_blocks` blocks."""

    def __init__(
        self,
        forward: Forward,
        *,
        max_rows: int,
        max_blocks: int,
        block_tokens: int,
        last_tokens: torch.Tensor,
        kv_heads: int,
        part_ends: Sequence[int],
    ) -> None:
        """A token `~s` stands for `last_tokens[s]`, with its value when the graph runs.

        Layers arrive in groups that end before each of `part_ends`; the last of these is the number of layers.
        """
        self._forward = forward
        self._part_ends = part_ends
        self._sizes = _SIZES[: bisect.bisect_left(_SIZES, max_rows) + 1]
        largest = self._sizes[-1]
        self._buffers = DecodeBuffers(
            max_rows=largest,
            max_blocks=max_blocks,
            block_tokens=block_tokens,
            last_tokens=last_tokens,
            kv_heads=kv_heads,
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._parted: dict[int, tuple[list[torch.cuda.CUDAGraph], torch.Tensor]] = {}
        self._block_tokens = block_tokens
        self._memory = torch.cuda.graph_pool_handle()

    def size_for(self, num_rows: int) -> int | None:
        """How many rows the graph for `num_rows` has; None if no graph is large enough."""
        place = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture_all(self) -> None:
        """Make every graph now, the largest first, so that none is made while requests wait."""
        for size in reversed(self._sizes):
            self._capture(size)

    def run(self, tokens: npt.NDArray[np.int64], batch: PagedArrays, arrivals: Sequence[Arrival] = ()) -> torch.Tensor:
        """Hidden states of a batch with the number of rows of a graph, including padding, behind `arrivals`."""
        num_rows = batch.num_rows
        self._buffers.fill(tokens, batch)
        if arrivals and self._parted:
            graphs, hidden = self._parted[num_rows]
            parts = list(zip(graphs, self._part_ends, strict=True))
        else:
            graph, hidden = self._graphs[num_rows]
            parts = [(graph, self._part_ends[-1])]
        for graph, end in parts:
            for arrival in arrivals:
                arrival.precede(end - 1)
            graph.replay()
        return hidden

    def _capture(self, num_rows: int) -> None:
        padding = PagedArrays.lay_out([], block_tokens=self._block_tokens, num_padding_rows=num_rows)
        self._buffers.fill(np.zeros(0, np.int64), padding)  # warming up must not write into blocks in use
        tokens, batch = self._buffers.tokens(num_rows), self._buffers.batch(num_rows)
        self._graphs[num_rows] = capture_graph(self._forward, tokens, batch, self._memory)
        if len(self._part_ends) > 1:
            self._parted[num_rows] = capture_parts(self._forward, tokens, batch, self._memory, self._part_ends)


def capture_graph(
    forward: Forward, tokens: torch.Tensor, batch: PagedBatch, memory: tuple[int, int]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `forward` over `tokens` and `batch` at their addresses, and where it leaves the hidden states."""
    device = tokens.device
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_NUM_WARM_UPS):
            forward(tokens, batch)
    torch.cuda.current_stream(device).wait_stream(side)
    graphs, hidden = _capture(forward, tokens, batch, _Cutter(memory, ()))
    return graphs[0], hidden


def capture_parts(
    forward: Forward, tokens: torch.Tensor, batch: PagedBatch, memory: tuple[int, int], part_ends: Sequence[int]
) -> tuple[list[torch.cuda.CUDAGraph], torch.Tensor]:
    """Like `capture_graph`, which must run first: it warms up. One graph for each of `part_ends`, to be run in order.

    Each but the last ends where the next group of layers begins its attention.
    """
    return _capture(forward, tokens, batch, _Cutter(memory, part_ends[:-1]))


class _Cutter:
    """Stands in for an arrival while graphs are captured, so that it sees every layer."""

    def __init__(self, memory: tuple[int, int], first_layers: Sequence[int]) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._memory = memory
        self._first_layers = first_layers
        self._is_capturing = False

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        # Meanwhile, other threads may register memory, for another engine of this process.
        self.graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._is_capturing = True

    def end(self) -> None:
        if self._is_capturing:
            self._is_capturing = False
            self.graphs[-1].capture_end()

    def precede(self, layer: int) -> None:
        if layer in self._first_layers:
            self.end()
            self.begin()


def _capture(
    forward: Forward, tokens: torch.Tensor, batch: PagedBatch, cutter: _Cutter
) -> tuple[list[torch.cuda.CUDAGraph], torch.Tensor]:
    torch.cuda.synchronize(tokens.device)
    with torch.cuda.stream(_side_stream(tokens.device)):
        cutter.begin()
        try:
            hidden = forward(tokens, batch, [cutter])
        finally:
            cutter.end()
    return cutter.graphs, hidden


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A single stream for all captures: graph memory that one capture frees is not reused on another stream."""
    return torch.cuda.Stream(device)
