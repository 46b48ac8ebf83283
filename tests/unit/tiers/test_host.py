"""What is the host tier's own, beside the contract of every tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import ConfigError, TierFull
from kvtier.testing.tier_contract import LAYOUT, chain, payloads
from kvtier.tiers.host import HostTier


@pytest.fixture
def tier() -> Iterator[HostTier]:
    with contextlib.closing(HostTier(LAYOUT, 4 * LAYOUT.slot_bytes)) as made:
        yield made


def test_memory_holds_whole_slots_only() -> None:
    with contextlib.closing(HostTier(LAYOUT, 4 * LAYOUT.slot_bytes - 1)) as tier:
        assert (tier.num_blocks, tier.num_free_blocks) == (3, 3)


def test_memory_for_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no block of 12KiB"):
        HostTier(LAYOUT, LAYOUT.slot_bytes - 1)


def test_a_slot_written_in_place_is_seen_once_it_is_committed(tier: HostTier) -> None:
    hashes = chain(1, 2)
    with tier.reserve(hashes) as reservation:
        for view, block in zip(reservation.views(), payloads(hashes), strict=True):
            view[:] = block
        assert tier.contains(hashes) == [False, False]
        assert reservation.commit(0, 1) == 1

    assert tier.contains(hashes) == [True, False]
    assert tier.num_free_blocks == 3


def test_a_match_of_what_is_being_written_says_so(tier: HostTier) -> None:
    hashes = chain(1, 2)
    with tier.reserve(hashes), tier.match(hashes) as lease:
        assert (lease.num_blocks, lease.ended) == (0, MatchEnd.PENDING)


def test_a_reservation_without_room_for_any_is_refused(tier: HostTier) -> None:
    with tier.reserve(chain(1, 4)), pytest.raises(TierFull, match="no room for 1 block"):
        tier.reserve(chain(2, 1))


def test_blocks_that_are_held_for_a_copy_elsewhere_stay_meanwhile(tier: HostTier) -> None:
    hashes = chain(1, 4)
    tier.offer(hashes[:3], payloads(hashes[:3]))
    with tier.hold(hashes) as held:
        assert (held.num_blocks, held.ended) == (3, MatchEnd.NEVER_STORED)
        assert list(map(bytes, held.views())) == payloads(hashes[:3])
        tier.offer(chain(2, 4), payloads(chain(2, 4)))
        assert tier.contains(hashes) == [True] * 3 + [False]
    with tier.hold(chain(3, 1)) as held:
        assert held.num_blocks == 0

    tier.offer(chain(4, 4), payloads(chain(4, 4)))
    assert tier.contains(hashes) == [False] * 4


def test_a_forgotten_lease_gives_its_blocks_back_with_the_next_call(tier: HostTier) -> None:
    hashes = chain(1, 4)
    tier.offer(hashes, payloads(hashes))
    lease = tier.match(hashes)
    with pytest.warns(ResourceWarning, match="never ended"):
        del lease

    assert tier.offer(chain(2, 4), payloads(chain(2, 4))) == 4


def test_a_block_that_was_evicted_is_told_from_one_that_was_never_stored_or_was_dropped(tier: HostTier) -> None:
    old, new = chain(1, 4), chain(2, 2)
    tier.offer(old, payloads(old))
    tier.offer(new, payloads(new))

    with tier.match(old) as lease:
        assert (lease.num_blocks, lease.ended) == (2, MatchEnd.EVICTED)
    assert tier.match(chain(3, 1)).ended is MatchEnd.NEVER_STORED
    tier.drop(old[:2])
    assert tier.match(old).ended is MatchEnd.NEVER_STORED
    tier.offer(old[:1], payloads(old[:1]))
    tier.drop()
    assert tier.match(old[3:]).ended is MatchEnd.NEVER_STORED
