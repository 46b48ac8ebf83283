"""A block of a pool, the stages of its life, and the blocks of one namespace by hash. `pool` has the rules."""

from __future__ import annotations

import enum
from typing import Any

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.run import Run
from kvtier.blocks.share import Share
from kvtier.blocks.space import TakenRegion

PINNED, RETAINED = 1, 2
"""The flags in `Block.kept`."""


class Presence(enum.Enum):
    """The state of one key."""

    MISS = enum.auto()
    PENDING = enum.auto()  # being written: try again later
    READY = enum.auto()


ENDED = {
    Presence.READY: MatchEnd.ALL,
    Presence.MISS: MatchEnd.NEVER_STORED,
    Presence.PENDING: MatchEnd.PENDING,
}
"""The `MatchEnd` of a lease, by the state of the key that ended its match."""


class BlockState(enum.Enum):
    """The stage of a block's life."""

    PRIVATE = enum.auto()  # has no hash yet: only its writer knows it
    PENDING = enum.auto()
    LOADING = enum.auto()  # its bytes are being loaded from a slower tier: a match may take it and wait
    READY = enum.auto()
    GONE = enum.auto()  # out of the index, waiting for its last reference


class Block(TakenRegion):
    """One block's place in a pool. `start` is its block id: the first unit it occupies."""

    __slots__ = ("hash", "index", "kept", "num_holds", "num_refs", "run", "state")

    def __init__(self, start: int, size: int) -> None:
        self.start = start  # without the base's __init__, for speed: a prompt makes thousands
        self.size = size
        self.left = self.right = None
        self.hash: BlockHash
        self.index: PrefixIndex
        self.num_refs = 1
        self.state = BlockState.PENDING
        self.kept = 0
        """The flags for pinned and retained, in one number to save memory; zero for most blocks."""
        self.num_holds = 0
        self.run: Run[Any] | None = None

    @property
    def is_pinned(self) -> bool:
        return bool(self.kept & PINNED)

    @is_pinned.setter
    def is_pinned(self, value: bool) -> None:
        self.kept = self.kept | PINNED if value else self.kept & ~PINNED

    @property
    def is_retained(self) -> bool:
        """Only a retention keeps the block from eviction."""
        return bool(self.kept & RETAINED)

    @is_retained.setter
    def is_retained(self, value: bool) -> None:
        self.kept = self.kept | RETAINED if value else self.kept & ~RETAINED

    @property
    def is_held(self) -> bool:
        return self.num_holds > 0

    @property
    def is_ready(self) -> bool:
        return self.state is BlockState.READY


class PrefixIndex:
    """The blocks of one namespace by hash. Every block in it has `block_units` units, and counts towards `share`.

    A hash names a whole prefix, so the longest cached prefix is the leading run of hashes that are READY. `scope`
    separates the index's hashes from those of other indexes in `Ghosts`.
    """

    def __init__(self, block_units: int, share: Share | None = None, scope: int = 0) -> None:
        self.block_units = block_units
        self.share = Share() if share is None else share
        self.scope = scope
        self.blocks: dict[BlockHash, Block] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def presence(self, block_hash: BlockHash) -> Presence:
        block = self.blocks.get(block_hash)
        if block is None:
            return Presence.MISS
        return Presence.PENDING if block.state is BlockState.PENDING else Presence.READY
