"""Blocks on the device that are being copied to the tiers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.blocks.block import Block


@dataclass(frozen=True, slots=True)
class DeviceLease:
    """`ids` are the device's block ids; `blocks` are the pool's blocks, for managers that have a pool."""

    ids: list[int]
    blocks: list[Block]
