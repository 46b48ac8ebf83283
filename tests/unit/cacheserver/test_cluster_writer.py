"""Blocks that cannot be written to a cluster are not tried again at once, however often they are queued."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.blocks.block import BlockState
from kvtier.cacheserver import cluster_writer
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.cluster_threads import SharedBlockOwner
from kvtier.cacheserver.cluster_writer import ClusterWriter
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.memory.mapped import MappedArena
from kvtier.testing.tier_contract import chain
from tests.support.waiting import FOR_EVER_S, wait_until


class UnplacedSpaces:
    """Nobody has said where any block stands."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(timeout_s=1.0, ttl_s=1e6)
        self.places: dict[bytes, object] = {}

    def of(self, space: object) -> UnplacedSpaces:
        return self

    def note_loss(self, kind: str, times: int) -> None: ...


class Owner:
    """Counts how often blocks were tried."""

    def __init__(self) -> None:
        self.num_tried = 0

    def begin_sharing(self, blocks: Sequence[MemoryBlock]) -> Sequence[MemoryBlock]:
        return blocks

    def end_sharing(self, blocks: Sequence[MemoryBlock], shared: Sequence[bool]) -> None:
        for block in blocks:
            block.is_sharing = False
        self.num_tried += len(blocks)


def test_what_could_not_be_written_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    block = MemoryBlock(0, 1)
    block.hash, block.state = chain(1, 1)[0], BlockState.READY
    space = cast(MemorySpace, SimpleNamespace(block_bytes=4096, is_table=lambda block: False))
    spaces, owner = cast(ClusterSpaces, UnplacedSpaces()), Owner()
    arena = cast(MappedArena, SimpleNamespace(nbytes=1 << 20))
    with contextlib.closing(ClusterWriter(spaces, arena, Bandwidth(None), sweeps=False)) as writer:
        writer.start(cast(SharedBlockOwner, owner))
        writer.queue(space, [block])
        wait_until(lambda: owner.num_tried == 1)
        monkeypatch.setattr(cluster_writer, "_RETRY_S", FOR_EVER_S)
        writer.queue(space, [block])
        assert not block.is_sharing
        monkeypatch.setattr(cluster_writer, "_RETRY_S", 0.0)
        writer.queue(space, [block])
        wait_until(lambda: owner.num_tried == 2)
