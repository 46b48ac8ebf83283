"""Memory above a disk: what is safe on disk goes first, by either policy."""

from __future__ import annotations

import pytest

from kvtier.blocks.block import Block, PrefixIndex
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.pool import BlockPool
from kvtier.cacheserver.disk_aware_lru import DiskAwareLru
from kvtier.cacheserver.disk_aware_policy import DiskAwarePolicy
from kvtier.cacheserver.namespaces import MemoryBlock

KINDS = ["adaptive", "lru"]


class Memory:
    """Three blocks, one prompt each, of which those with a number in `stored` are on disk."""

    def __init__(self, kind: str, *, evicts_unsafe: bool, stored: set[int]) -> None:
        self.lost: list[Block] = []
        policy: EvictionPolicy[Block]
        if kind == "lru":
            policy = DiskAwareLru(evicts_unsafe=evicts_unsafe, on_unsafe=self.lost.append)
        else:
            policy = DiskAwarePolicy(evicts_unsafe=evicts_unsafe, on_unsafe=self.lost.append, clock=lambda: 0.0)
        self.pool = BlockPool(3, policy, make=MemoryBlock)
        self.index = PrefixIndex(1)
        for number in range(3):
            self.store(number)
            block = self.index.blocks[name(number)]
            assert isinstance(block, MemoryBlock)
            block.is_stored, block.is_queued = number in stored, True

    def store(self, number: int) -> int:
        granted = self.pool.reserve(self.index, [name(number)]).blocks
        self.pool.commit(granted)
        self.pool.free(granted)
        return len(granted)

    def cached(self) -> list[int]:
        return [number for number in range(9) if name(number) in self.index.blocks]


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 8)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_disk_goes_before_what_is_older(kind: str) -> None:
    memory = Memory(kind, evicts_unsafe=True, stored={1, 2})

    memory.store(7)

    assert memory.cached() == [0, 2, 7]
    assert memory.lost == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_oldest_goes_and_is_told_of_when_nothing_is_on_disk(kind: str) -> None:
    memory = Memory(kind, evicts_unsafe=True, stored=set())

    memory.store(7)

    assert memory.cached() == [1, 2, 7]
    assert [block.hash for block in memory.lost] == [name(0)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_never_to_go_to_disk_is_as_old_as_it_is(kind: str) -> None:
    memory = Memory(kind, evicts_unsafe=True, stored={1, 2})
    withheld = memory.index.blocks[name(0)]
    assert isinstance(withheld, MemoryBlock)
    withheld.is_queued = False

    memory.store(7)

    assert memory.cached() == [1, 2, 7]
    assert memory.lost == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_goes_that_must_reach_the_disk_first(kind: str) -> None:
    memory = Memory(kind, evicts_unsafe=False, stored=set())

    assert memory.store(7) == 0
    assert memory.cached() == [0, 1, 2]


def test_where_the_least_worth_is_not_on_disk_yet_the_oldest_that_is_goes() -> None:
    """Prompts that come back first, then a flood of others: LRU never lost one of those to a slow disk."""
    now, lost = [0.0], []
    pool = BlockPool(
        400, DiskAwarePolicy(evicts_unsafe=True, on_unsafe=lost.append, clock=lambda: now[0]), make=MemoryBlock
    )
    index = PrefixIndex(1)

    def ask(first: int, count: int, *, is_stored: bool) -> None:
        hashes = [BlockHash(number.to_bytes(8, "little")) for number in range(first, first + count)]
        matched = pool.match(index, hashes).blocks
        granted = pool.reserve(index, hashes).blocks
        for block in granted:
            assert isinstance(block, MemoryBlock)
            block.is_stored, block.is_queued = is_stored, not is_stored
        pool.commit(granted)
        pool.free(matched + granted)

    for turn in range(3000):
        now[0] = 2.0 * turn
        ask(turn % 3 * 100, 100, is_stored=True)
        ask(100_000 + 100 * turn, 30, is_stored=True)
    for turn in range(38):
        now[0] += 0.1
        ask(900_000 + 100 * turn, 10, is_stored=False)
    policy = pool._policy
    assert isinstance(policy, DiskAwarePolicy)

    assert lost == []
    assert all(isinstance(block, MemoryBlock) for block in index.blocks.values())
