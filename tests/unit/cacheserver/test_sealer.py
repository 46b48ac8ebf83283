"""Blocks get their checksum once a burst of commits is over, and no commit fails however many there are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvtier.blocks.block import BlockState
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver import sealer as sealer_module
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.cacheserver.sealer import Sealer
from kvtier.cacheserver.tenants import Tenant
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena
from tests.support.waiting import wait_until

NAMESPACE = Namespace(b"n" * 32)


@pytest.fixture
def arena() -> Iterator[MappedArena]:
    arena = MappedArena.create(16 * SLOT_ALIGN_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def sealer(arena: MappedArena) -> Iterator[Sealer]:
    sealer = Sealer(arena)
    yield sealer
    sealer.close()


@pytest.fixture
def space() -> MemorySpace:
    return MemorySpace(1, Tenant("", sees_all=True), NAMESPACE, NAMESPACE, "model", SLOT_ALIGN_BYTES, 16)


def ready(number: int, *, named: bytes | None = None) -> MemoryBlock:
    block = MemoryBlock(number, 1)
    block.hash = BlockHash(bytes([number]) * 32 if named is None else named)
    block.state = BlockState.READY
    return block


def test_blocks_get_the_checksum_of_their_bytes(arena: MappedArena, sealer: Sealer, space: MemorySpace) -> None:
    blocks = [ready(number) for number in range(4)]
    for block in blocks:
        arena.view(block.start * SLOT_ALIGN_BYTES, 5)[:] = b"bytes"
    sealer.queue(space, blocks)

    wait_until(lambda: sealer.num_queued == 0)
    expected = memoryview(b"bytes".ljust(SLOT_ALIGN_BYTES, b"\0"))
    assert [block.checksum for block in blocks] == [checksum_of(NAMESPACE, block.hash, expected) for block in blocks]


def test_what_has_one_is_gone_or_is_a_table_is_left_alone(sealer: Sealer, space: MemorySpace) -> None:
    has_one, gone, table = ready(2), ready(3), ready(4, named=NAMESPACE)
    has_one.checksum = 7
    gone.state = BlockState.GONE
    sealer.queue(space, [has_one, gone, table])

    wait_until(lambda: sealer.num_queued == 0)
    assert [block.checksum for block in (has_one, gone, table)] == [7, None, None]


def test_more_than_may_wait_are_left_to_their_first_reader_and_nobody_fails(
    arena: MappedArena, space: MemorySpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while more than may wait are at work."""
    monkeypatch.setattr(sealer_module, "_MAX_QUEUED", 3)
    is_at_work, may_go_on = threading.Event(), threading.Event()

    class HeldSealer(Sealer):
        def _seal(self, space: MemorySpace, block: object) -> None:
            is_at_work.set()
            may_go_on.wait()
            super()._seal(space, block)  # type: ignore[arg-type]

    sealer = HeldSealer(arena)
    try:
        first, late = [ready(number) for number in range(3)], [ready(number) for number in range(4, 8)]
        sealer.queue(space, first)
        is_at_work.wait()
        sealer.queue(space, late)  # too many, beside those at work
        sealer.queue(space, late[:1])
        may_go_on.set()
        wait_until(lambda: sealer.num_queued == 0)
        sealer.queue(space, late[1:2])
        wait_until(lambda: late[1].checksum is not None)
        assert all(block.checksum is not None for block in first)
        assert late[2].checksum is None
    finally:
        may_go_on.set()
        sealer.close()
