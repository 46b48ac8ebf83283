"""The device's KV memory: one tensor, block-major, in the format that a block has everywhere."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.blocks.layout import KvLayout
from kvtier.engine.schedule.step import BlockCopy
from kvtier.kernels.upload import upload


class KvArena:
    """`num_blocks` blocks of `layout` on `device`. `layers[i]` is layer i's strided view, as kernels take it."""

    def __init__(self, num_blocks: int, layout: KvLayout, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.device = device
        self.blocks = torch.zeros((num_blocks, *layout.shape), dtype=getattr(torch, layout.dtype), device=device)
        self.layers = [self.blocks[:, layer] for layer in range(layout.layers)]

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy whole blocks, in the current stream's order. No target may be a source."""
        pairs = np.array([(copy.source, copy.target) for copy in copies], np.int64)
        sources, targets = upload([pairs[:, 0].copy(), pairs[:, 1].copy()], self.device)
        self.blocks[targets] = self.blocks[sources]
