"""Finds where a prompt with blocks in several groups can be resumed. Runs on the threads of `lookup`. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.tiers.tier import Tier
from kvtier.transfer.block_groups import BlockGroups
from kvtier.transfer.lookup import Searched
from kvtier.transfer.reach import AttentionKind, longest_resumable

_MAX_TRIES = 3
"""Blocks that were present a moment ago may be evicted before they are leased."""


class GroupSearch:
    """A `Search` in one tier. A lease covers everything that a boundary needs, or nothing."""

    def __init__(self, tier: Tier, groups: BlockGroups) -> None:
        self._tier = tier
        self._groups = groups

    def __call__(self, chain: Sequence[BlockHash], first: int, num_tokens: int, timeout_s: float) -> Searched:
        groups = self._groups
        first_token = first * groups.block_tokens
        most = num_tokens // groups.unit_tokens * groups.unit_tokens
        if most <= first_token:
            return Searched(EmptyLease(MatchEnd.ALL), first, [], MatchEnd.ALL)
        needed = groups.needed(chain, most, first_token)
        lease, ended = self._lease(needed, timeout_s)
        end_token = most
        tries = 0
        while lease is None and tries < _MAX_TRIES and ended not in (MatchEnd.TIER_DOWN, MatchEnd.LIMIT):
            tries += 1
            end_token = self._resumable(chain, most, first_token)
            if end_token <= first_token:
                break
            needed = groups.needed(chain, end_token, first_token)
            lease, why = self._lease(needed, timeout_s)
            ended = why if lease is None else ended
        if lease is None:
            return Searched(EmptyLease(ended), first, [], ended)
        return Searched(lease, end_token // groups.block_tokens, needed, MatchEnd.ALL if end_token == most else ended)

    def _lease(self, needed: Sequence[BlockHash], timeout_s: float) -> tuple[Lease | None, MatchEnd]:
        """A lease of all of them, or None and the reason."""
        if not needed:  # only finished chunks: nothing of them is cached
            return None, MatchEnd.NEVER_STORED
        lease = self._tier.match_lazily(needed, timeout_s=timeout_s)
        if lease.num_blocks + lease.num_stored == len(needed):
            return lease, lease.ended
        ended = lease.ended
        lease.release()
        return None, ended

    def _resumable(self, chain: Sequence[BlockHash], most: int, first_token: int) -> int:
        """The last boundary up to `most` where everything needed is present."""
        groups = self._groups
        present: list[Sequence[bool]] = [()] * len(groups.reaches)
        by_reach = sorted(
            range(len(groups.reaches)), key=lambda group: groups.reaches[group].attention is not AttentionKind.FULL
        )
        for group in by_reach:  # where full attention lacks blocks, no other group need be looked up
            reach = groups.reaches[group]
            first, end = first_token // reach.block_tokens, most // reach.block_tokens
            present[group] = [True] * first + self._tier.contains(groups.keys(group, chain, first, end))
            if reach.attention is AttentionKind.FULL:
                most = longest_resumable([(reach, present[group])], groups.unit_tokens, most, first_token)
                if most <= first_token:
                    return 0
        return longest_resumable(list(zip(groups.reaches, present, strict=True)), groups.unit_tokens, most, first_token)
