"""A prompt in several groups of blocks, looked for in a tier: where it can be resumed, and what is leased for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.testing.faults import WrappedTier
from kvtier.testing.tier_contract import LAYOUT, payloads
from kvtier.tiers.host import HostTier
from kvtier.transfer.block_groups import BlockGroups
from kvtier.transfer.group_search import GroupSearch
from kvtier.transfer.lookup import Searched
from kvtier.transfer.reach import AttentionKind, Reach, longest_resumable

_TOKENS = 16
_FULL = Reach(AttentionKind.FULL, _TOKENS)
_WINDOW = Reach(AttentionKind.WINDOW, _TOKENS, 3 * _TOKENS + 1)
_STATE = Reach(AttentionKind.STATE, _TOKENS)
_HYBRID = BlockGroups((_FULL, _WINDOW, _STATE))
_NUM_BLOCKS = 10
_CHAIN = block_hashes(Namespace(bytes(32)), range(_NUM_BLOCKS * _TOKENS), _TOKENS)
_PROMPT_TOKENS = _NUM_BLOCKS * _TOKENS


class _Tier(WrappedTier):
    """Counts what is leased. `on_match` is called before each match."""

    def __init__(self) -> None:
        super().__init__(HostTier(LAYOUT, 64 * LAYOUT.slot_bytes, "server"))
        self.leases: list[Any] = []
        self.on_match: Any = lambda: None
        self.ending: MatchEnd | None = None

    @property
    def num_held(self) -> int:
        return sum(not vars(lease)["_is_over"] for lease in self.leases)

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self.on_match()
        if self.ending is not None:
            return EmptyLease(self.ending)
        lease = self.match(hashes)
        if lease.num_blocks:
            self.leases.append(lease)
        return lease

    def put(self, hashes: Sequence[BlockHash]) -> None:
        self.offer(hashes, payloads(hashes))


@pytest.fixture
def tier() -> Iterator[_Tier]:
    tier = _Tier()
    yield tier
    assert tier.num_held == 0
    tier.close()


def _searched(tier: _Tier, groups: BlockGroups = _HYBRID, first: int = 0, num_tokens: int = _PROMPT_TOKENS) -> Searched:
    return GroupSearch(tier, groups)(_CHAIN, first, num_tokens, 1.0)


def test_groups_share_no_keys_and_the_first_has_those_of_the_chain() -> None:
    keys = [_HYBRID.keys(group, _CHAIN, 0, _NUM_BLOCKS) for group in range(3)]

    assert keys[0] == _CHAIN
    assert len({key for some in keys for key in some}) == 3 * _NUM_BLOCKS


def test_blocks_of_other_sizes_are_named_by_where_they_end() -> None:
    groups = BlockGroups((Reach(AttentionKind.FULL, 16), Reach(AttentionKind.WINDOW, 32, 40)))

    assert (groups.block_tokens, groups.unit_tokens) == (16, 32)
    assert groups.reached(1, 96) == range(1, 3)
    assert groups.key(1, _CHAIN, 1) == BlockGroups((_FULL, _FULL)).key(1, _CHAIN, 3)


def test_a_boundary_needs_all_of_full_attention_the_window_and_one_state(tier: _Tier) -> None:
    end = 8
    needed = _HYBRID.needed(_CHAIN, end * _TOKENS)
    tier.put(needed)

    searched = _searched(tier)

    assert len(needed) == end + 3 + 1
    assert (searched.end, searched.blocks, searched.ended) == (end, needed, MatchEnd.NEVER_STORED)
    assert searched.lease.num_blocks == len(needed)
    searched.lease.release()


def test_all_of_a_prompt_is_found_at_once(tier: _Tier) -> None:
    tier.put(_HYBRID.needed(_CHAIN, _PROMPT_TOKENS))

    searched = _searched(tier)

    assert (searched.end, searched.ended, len(tier.leases)) == (_NUM_BLOCKS, MatchEnd.ALL, 1)
    searched.lease.release()


def test_without_its_state_a_prefix_is_resumed_where_there_is_one(tier: _Tier) -> None:
    tier.put(_HYBRID.needed(_CHAIN, 8 * _TOKENS))
    tier.put(_HYBRID.needed(_CHAIN, 4 * _TOKENS))
    tier.drop([_HYBRID.key(2, _CHAIN, 7)])

    searched = _searched(tier)

    assert searched.end == 4
    searched.lease.release()


def test_what_the_device_has_is_not_asked_for(tier: _Tier) -> None:
    needed = _HYBRID.needed(_CHAIN, 8 * _TOKENS, first_token=6 * _TOKENS)
    tier.put(needed)

    assert len(needed) == 2 + 2 + 1
    assert _searched(tier).end == 0
    searched = _searched(tier, first=6)
    assert (searched.end, searched.blocks) == (8, needed)
    searched.lease.release()


def test_nothing_is_found_in_less_than_a_unit(tier: _Tier) -> None:
    searched = _searched(tier, num_tokens=_TOKENS - 1)

    assert (searched.end, searched.lease.num_blocks) == (0, 0)


def test_a_block_that_goes_while_it_is_looked_for_leaves_a_shorter_prefix(tier: _Tier) -> None:
    tier.put(_HYBRID.needed(_CHAIN, 8 * _TOKENS))
    tier.put(_HYBRID.needed(_CHAIN, 5 * _TOKENS))
    num_matches = 0

    def lose_the_state_after_the_first_match() -> None:
        nonlocal num_matches
        num_matches += 1
        if num_matches == 2:
            tier.drop([_HYBRID.key(2, _CHAIN, 7)])

    tier.on_match = lose_the_state_after_the_first_match
    searched = _searched(tier)

    assert (searched.end, num_matches) == (5, 3)
    searched.lease.release()


@pytest.mark.parametrize("ending", [MatchEnd.TIER_DOWN, MatchEnd.LIMIT])
def test_a_tier_that_gives_nothing_now_is_not_asked_again(tier: _Tier, ending: MatchEnd) -> None:
    tier.ending = ending

    searched = _searched(tier)

    assert (searched.end, searched.ended, searched.lease.ended) == (0, ending, ending)


def test_chunks_that_are_done_with_alone_are_no_hit(tier: _Tier) -> None:
    searched = _searched(tier, BlockGroups((Reach(AttentionKind.CHUNK, _TOKENS, 2 * _TOKENS),)))

    assert (searched.end, searched.lease.num_blocks) == (0, 0)


@given(present=st.lists(st.lists(st.booleans(), min_size=_NUM_BLOCKS, max_size=_NUM_BLOCKS), min_size=3, max_size=3))
def test_what_is_found_is_the_longest_prefix_that_can_be_resumed(present: list[list[bool]]) -> None:
    tier = _Tier()
    for group, flags in enumerate(present):
        keys = [
            key for key, is_there in zip(_HYBRID.keys(group, _CHAIN, 0, _NUM_BLOCKS), flags, strict=True) if is_there
        ]
        if keys:
            tier.put(keys)
    expected = longest_resumable(list(zip(_HYBRID.reaches, present, strict=True)), _TOKENS, _PROMPT_TOKENS)

    searched = _searched(tier)

    assert searched.end * _TOKENS == expected
    assert searched.lease.num_blocks == (len(_HYBRID.needed(_CHAIN, expected)) if expected else 0)
    searched.lease.release()
    assert tier.num_held == 0
    tier.close()
