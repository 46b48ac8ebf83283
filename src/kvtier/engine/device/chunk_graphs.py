"""Runs small steps that are not plain decodes as CUDA graphs: mostly the rest of prompts behind a cached prefix.

Such a step takes the device a few milliseconds; launching its kernels one by one would take the host several times as
long. A graph has a fixed number of tokens and rows, so steps are padded to the next size: padding tokens belong to no
row and write nothing, padding rows have no queries. Owned by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.device.decode_graphs import Forward, capture_graph
from kvtier.kernels.paged_batch import ChunkBuffers, PagedArrays

_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
MAX_GRAPH_TOKENS = _TOKENS[-1]
_TOKENS_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """The tokens and rows that a graph has room for."""

    num_tokens: int
    num_rows: int


class ChunkGraphs:
    """Graphs for up to `max_tokens` tokens in up to `max_rows` rows of up to `max_blocks` blocks."""

    def __init__(
        self,
        forward: Forward,
        *,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        block_tokens: int,
        last_tokens: torch.Tensor,
    ) -> None:
        """Parameters are as for `DecodeGraphs`."""
        self._forward = forward
        self.sizes = chunk_sizes(max_tokens, max_rows)
        self._block_tokens = block_tokens
        self._graphs: dict[ChunkSize, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if not self.sizes:
            return
        largest = self.sizes[-1]
        self._buffers = ChunkBuffers(
            max_tokens=largest.num_tokens,
            max_rows=largest.num_rows,
            max_blocks=max_blocks,
            block_tokens=block_tokens,
            last_tokens=last_tokens,
        )
        self._memory = torch.cuda.graph_pool_handle()

    def size_for(self, num_tokens: int, num_rows: int) -> ChunkSize | None:
        """The size of the graph for a step; None if no graph is large enough."""
        return smallest_size(self.sizes, num_tokens, num_rows)

    def capture_all(self) -> None:
        """Make every graph now, the largest first, so that none is made while requests wait."""
        for size in reversed(self.sizes):
            self._capture(size)

    def run(self, tokens: npt.NDArray[np.int64], batch: PagedArrays, size: ChunkSize) -> torch.Tensor:
        """Hidden states of a batch with exactly the tokens and rows of a graph, including padding."""
        graph, hidden = self._graphs[size]
        self._buffers.fill(tokens, batch)
        graph.replay()
        return hidden

    def _capture(self, size: ChunkSize) -> None:
        num_tokens, num_rows = size.num_tokens, size.num_rows
        padding = PagedArrays.lay_out(
            [], block_tokens=self._block_tokens, num_empty_rows=num_rows, num_padding_tokens=num_tokens
        )
        self._buffers.fill(np.zeros(0, np.int64), padding)  # warming up must not write into blocks in use
        tokens, batch = self._buffers.tokens(num_tokens), self._buffers.batch(num_tokens, num_rows)
        self._graphs[size] = capture_graph(self._forward, tokens, batch, self._memory)


def chunk_sizes(max_tokens: int, max_rows: int) -> tuple[ChunkSize, ...]:
    """The sizes of graphs for an engine with these limits per step."""
    return tuple(
        ChunkSize(num_tokens, min(num_tokens // _TOKENS_PER_ROW, max_rows))
        for num_tokens in _TOKENS
        if num_tokens <= max_tokens
    )


def smallest_size(sizes: Sequence[ChunkSize], num_tokens: int, num_rows: int) -> ChunkSize | None:
    """The first of the ascending `sizes` that has room."""
    return next((size for size in sizes if num_tokens <= size.num_tokens and num_rows <= size.num_rows), None)
