"""The blocks of a prompt whose layers form several groups. Every block has its own key. No torch.

A prompt has one chain of hashes over its tokens. A group's block is named by the hash of the chain where the block
ends, and by the group. The first group's keys are those hashes themselves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.transfer.reach import AttentionKind, Reach

_GROUP = b"group"


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The reach of each group. Blocks of all groups have the same size in bytes."""

    reaches: tuple[Reach, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the chain. Every group's block size is a multiple of it."""
        return math.gcd(*(reach.block_tokens for reach in self.reaches))

    @property
    def unit_tokens(self) -> int:
        """A prefix can be resumed at multiples of this."""
        return math.lcm(*(reach.block_tokens for reach in self.reaches))

    @property
    def is_one_full(self) -> bool:
        """All layers look back to the first token, in one group: a prefix can be resumed after any of its blocks."""
        return len(self.reaches) == 1 and self.reaches[0].attention is AttentionKind.FULL

    def key(self, group: int, chain: Sequence[BlockHash], number: int) -> BlockHash:
        """The key of block `number` of a group."""
        ratio = self.reaches[group].block_tokens // self.block_tokens
        end = chain[(number + 1) * ratio - 1]
        # No token block can have this hash: the chain digests inputs of another length.
        return BlockHash(hashlib.sha256(_GROUP + group.to_bytes(2, "little") + end).digest()) if group else end

    def keys(self, group: int, chain: Sequence[BlockHash], first: int, end: int) -> list[BlockHash]:
        return [self.key(group, chain, number) for number in range(first, end)]

    def reached(self, group: int, num_tokens: int, first_token: int = 0) -> range:
        """The group's blocks that a prefix of `num_tokens` needs, without those before `first_token`."""
        reach = self.reaches[group]
        first = max(reach.first_block(num_tokens), first_token // reach.block_tokens)
        return range(first, num_tokens // reach.block_tokens)

    def needed(self, chain: Sequence[BlockHash], num_tokens: int, first_token: int = 0) -> list[BlockHash]:
        """The keys of all groups' `reached` blocks: the few of states and windows come first."""
        by_reach = sorted(
            range(len(self.reaches)), key=lambda group: self.reaches[group].attention is AttentionKind.FULL
        )
        return [
            self.key(group, chain, number)
            for group in by_reach
            for number in self.reached(group, num_tokens, first_token)
        ]
