"""Decode steps as CUDA graphs: one launch instead of a thousand. The engine's thread owns it.

A graph reads its inputs from fixed addresses and stands for one number of rows, so steps are padded up to the next
size; rows of padding read and write nothing. Graphs share their memory: what one returns is gone with the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.paged_batch import DecodeBuffers, PagedArrays, PagedBatch

Forward = Callable[[torch.Tensor, PagedBatch], torch.Tensor]
"""Hidden states of the tokens of a batch."""

_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1025, 64))
MAX_GRAPH_ROWS = _SIZES[-1]
_NUM_WARM_UPS = 2


class DecodeGraphs:
    """Graphs for up to `max_rows` rows of up to `max_blocks` blocks."""

    def __init__(
        self, forward: Forward, *, max_rows: int, max_blocks: int, block_tokens: int, last_tokens: torch.Tensor
    ) -> None:
        """A token `~s` stands for `last_tokens[s]`, as it is when the graph's turn comes."""
        self._forward = forward
        self._sizes = _SIZES[: bisect.bisect_left(_SIZES, max_rows) + 1]
        largest = self._sizes[-1]
        self._buffers = DecodeBuffers(
            max_rows=largest, max_blocks=max_blocks, block_tokens=block_tokens, last_tokens=last_tokens
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._block_tokens = block_tokens
        self._memory = torch.cuda.graph_pool_handle()

    def size_for(self, num_rows: int) -> int | None:
        """How many rows the graph for `num_rows` has; None when there is none that large."""
        place = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def capture_all(self) -> None:
        """Make every graph now, the largest first, so that none is made while requests wait."""
        for size in reversed(self._sizes):
            self._capture(size)

    def run(self, tokens: npt.NDArray[np.int64], batch: PagedArrays) -> torch.Tensor:
        """Hidden states of a batch with the number of rows of a graph, padding included."""
        num_rows = batch.num_rows
        if num_rows not in self._graphs:
            self._capture(num_rows)
        graph, hidden = self._graphs[num_rows]
        self._buffers.fill(tokens, batch)
        graph.replay()
        return hidden

    def _capture(self, num_rows: int) -> None:
        padding = PagedArrays.lay_out([], block_tokens=self._block_tokens, num_padding_rows=num_rows)
        self._buffers.fill(np.zeros(0, np.int64), padding)  # warming up must not write into anybody's blocks
        tokens, batch = self._buffers.tokens(num_rows), self._buffers.batch(num_rows)
        self._graphs[num_rows] = capture_graph(self._forward, tokens, batch, self._memory)


def capture_graph(
    forward: Forward, tokens: torch.Tensor, batch: PagedBatch, memory: tuple[int, int]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `forward` over `tokens` and `batch` where they lie, and where it leaves the hidden states."""
    device = tokens.device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_NUM_WARM_UPS):
            forward(tokens, batch)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may register memory meanwhile, for another engine of this process.
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        hidden = forward(tokens, batch)
    return graph, hidden
