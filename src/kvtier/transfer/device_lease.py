"""Blocks of the device that are being copied away. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.blocks.pool import Block


@dataclass(frozen=True, slots=True)
class DeviceLease:
    """`ids` are the device's; `blocks` the pool's, for managers that have one."""

    ids: list[int]
    blocks: list[Block]
