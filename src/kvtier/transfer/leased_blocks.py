"""Blocks leased by one process for another that has mapped the same memory. Picklable."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.memory.lease import BlockLease
from kvtier.memory.mapped import MappedArena


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """`offsets` in the arena with this `inode`. The process that leased them ends the lease."""

    inode: int
    offsets: list[int]

    def lease_in(self, arena: MappedArena, block_bytes: int, hashes: list[BlockHash]) -> BlockLease | None:
        """A lease whose end is not reported to a server. None if `arena` is another one."""
        if arena.inode != self.inode:
            return None
        return BlockLease(
            arena,
            self.offsets,
            block_bytes,
            hashes,
            MatchEnd.ALL,
            pull=_never,
            arrive=_all,
            num_ready=len(self.offsets),
            end=_nothing,
            forget=_nothing,
        )


def _never(*_: object) -> int:
    raise AssertionError("these blocks lie in memory of this host")


def _all(count: int) -> int:
    return count


def _nothing() -> None:
    pass
