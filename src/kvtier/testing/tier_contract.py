"""The laws of every tier. Inherit `TierContract` in a test module and provide the fixture `make_tier`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.errors import CapacityError, ConfigError, LeaseError
from kvtier.tiers.tier import Tier

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
"""10,240 bytes a block, in slots of 12 KiB: a stride that is not the size."""

CAPACITY_BLOCKS = 32

NAMESPACE = Namespace(bytes(range(32)))

MakeTier = Callable[[], Tier]


def chain(seed: int, num_blocks: int) -> list[BlockHash]:
    """The hashes of a prompt that belongs to `seed`."""
    return block_hashes(NAMESPACE, [seed] * (num_blocks * LAYOUT.block_tokens), LAYOUT.block_tokens)


def payload(block_hash: BlockHash) -> bytes:
    """The bytes that belong to a hash, so that any wrong byte shows."""
    return random.Random(block_hash).randbytes(LAYOUT.block_bytes)


def payloads(hashes: list[BlockHash]) -> list[bytes]:
    return [payload(block_hash) for block_hash in hashes]


def empty_buffers(count: int) -> list[bytearray]:
    return [bytearray(b"\xa5" * LAYOUT.block_bytes) for _ in range(count)]


def fetch_all(tier: Tier, hashes: list[BlockHash]) -> list[bytes]:
    """The blocks that the tier delivers for the leading part of `hashes`."""
    into = empty_buffers(len(hashes))
    with tier.match(hashes) as lease:
        arrived = lease.fetch(into[: lease.num_blocks])
        assert arrived == lease.num_blocks or not tier.holds_leases
    return [bytes(buffer) for buffer in into[:arrived]]


class TierContract:
    """Laws of a tier with room for `CAPACITY_BLOCKS` blocks of `LAYOUT` in `NAMESPACE`."""

    @pytest.fixture
    def make_tier(self) -> Iterator[MakeTier]:
        """Override: yield a function that makes an empty tier, then close the tiers it made."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> Tier:
        return make_tier()

    def test_what_was_offered_comes_back_byte_for_byte(self, tier: Tier) -> None:
        hashes = chain(1, 8)
        assert tier.offer(hashes, payloads(hashes)) == 8

        assert fetch_all(tier, hashes) == payloads(hashes)

    def test_an_empty_tier_matches_nothing(self, tier: Tier) -> None:
        with tier.match(chain(1, 4)) as lease:
            assert lease.num_blocks == 0
            assert lease.ended is MatchEnd.NEVER_STORED
            assert lease.fetch(empty_buffers(4)) == 0

    def test_a_match_ends_at_the_first_block_that_is_missing(self, tier: Tier) -> None:
        hashes = chain(1, 6)
        present = hashes[:3] + hashes[4:]
        tier.offer(present, payloads(present))

        with tier.match(hashes) as lease:
            assert lease.num_blocks == 3
            assert lease.ended is MatchEnd.NEVER_STORED
        assert tier.contains(hashes) == [True, True, True, False, True, True]

    def test_a_match_of_everything_says_so(self, tier: Tier) -> None:
        hashes = chain(1, 3)
        tier.offer(hashes, payloads(hashes))

        with tier.match(hashes) as lease:
            assert (lease.num_blocks, lease.ended) == (3, MatchEnd.ALL)

    def test_a_match_of_no_hashes_is_empty(self, tier: Tier) -> None:
        with tier.match([]) as lease:
            assert lease.num_blocks == 0

    def test_a_lazy_match_finds_what_a_match_finds(self, tier: Tier) -> None:
        hashes = chain(1, 6)
        tier.offer(hashes[:4], payloads(hashes[:4]))

        with tier.match_lazily(hashes) as lease:
            assert lease.num_blocks + lease.num_stored == 4
            assert lease.ended is MatchEnd.NEVER_STORED
        with tier.match(hashes) as lease:
            assert lease.num_blocks == 4

    def test_the_slots_of_a_local_tier_are_written_in_place(self, tier: Tier) -> None:
        if not tier.is_local:
            pytest.skip("this tier is not local")
        hashes = chain(1, 4)
        with tier.reserve(hashes) as reservation:
            assert reservation.arena is not None
            assert tier.match(hashes).ended is MatchEnd.PENDING
            reservation.fill(payloads(hashes))
            assert reservation.commit() == 4

        assert fetch_all(tier, hashes) == payloads(hashes)

    def test_a_local_tiers_leases_say_where_its_blocks_lie(self, tier: Tier) -> None:
        hashes = chain(1, 3)
        tier.offer(hashes, payloads(hashes))

        with tier.match(hashes) as lease:
            assert lease.num_ready_at_match == 3
            assert (lease.arena is not None) == (tier.arena is not None) == tier.is_local
            if lease.arena is not None:
                found = [bytes(lease.arena.view(offset, LAYOUT.block_bytes)) for offset in lease.offsets]
                assert found == payloads(hashes)

    def test_a_block_offered_twice_is_written_once(self, tier: Tier) -> None:
        hashes = chain(1, 4)
        assert tier.offer(hashes, payloads(hashes)) == 4
        assert tier.offer(hashes, payloads(hashes)) == 0
        assert tier.offer([*hashes, *chain(2, 1)], [*payloads(hashes), *payloads(chain(2, 1))]) == 1

    def test_what_is_leased_survives_any_flood(self, tier: Tier) -> None:
        kept = chain(1, 4)
        tier.offer(kept, payloads(kept))
        into = empty_buffers(4)

        with tier.match(kept) as lease:
            for seed in range(100, 100 + 3 * CAPACITY_BLOCKS):
                hashes = chain(seed, 1)
                tier.offer(hashes, payloads(hashes))
            arrived = lease.fetch(into)

        assert arrived == 4 or not tier.holds_leases
        assert [bytes(buffer) for buffer in into[:arrived]] == payloads(kept)[:arrived]

    def test_a_flood_evicts_the_coldest_and_keeps_the_newest(self, tier: Tier) -> None:
        seeds = range(100, 100 + 3 * CAPACITY_BLOCKS)
        for seed in seeds:
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))

        assert tier.contains(chain(seeds[0], 1)) == [False]
        assert fetch_all(tier, chain(seeds[-1], 1)) == payloads(chain(seeds[-1], 1))
        present = sum(tier.contains([chain(seed, 1)[0] for seed in seeds]))
        assert 1 <= present <= CAPACITY_BLOCKS

    def test_a_match_tells_what_was_evicted_from_what_was_never_there_or_was_dropped(self, tier: Tier) -> None:
        seeds = range(100, 100 + 3 * CAPACITY_BLOCKS)
        for seed in seeds:
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
        oldest, newest = chain(seeds[0], 1), chain(seeds[-1], 2)

        assert tier.match(oldest).ended is MatchEnd.EVICTED
        with tier.match(newest) as lease:
            assert (lease.num_blocks, lease.ended) == (1, MatchEnd.NEVER_STORED)
        tier.drop(newest)
        assert tier.match(newest).ended is MatchEnd.NEVER_STORED
        tier.offer(oldest, payloads(oldest))
        with tier.match(oldest) as lease:
            assert lease.ended is MatchEnd.ALL
        tier.drop(oldest)
        assert tier.match(oldest).ended is MatchEnd.NEVER_STORED

    def test_a_prefix_loses_its_end_before_its_beginning(self, tier: Tier) -> None:
        hashes = chain(1, CAPACITY_BLOCKS // 2)
        tier.offer(hashes, payloads(hashes))
        num_others = 3 * CAPACITY_BLOCKS // 4
        for seed in range(100, 100 + num_others):
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))

        flags = tier.contains(hashes)
        assert flags == sorted(flags, reverse=True)
        assert flags[0]
        assert not flags[-1]

    def test_a_tier_full_of_leases_takes_nothing_and_loses_nothing(self, tier: Tier) -> None:
        if not tier.holds_leases:
            pytest.skip("this tier's leases are weak")
        hashes = chain(1, CAPACITY_BLOCKS)
        assert tier.offer(hashes, payloads(hashes)) == CAPACITY_BLOCKS
        other = chain(2, 2)

        with tier.match(hashes) as lease:
            assert lease.num_blocks == CAPACITY_BLOCKS
            with pytest.raises(CapacityError):
                tier.offer(other, payloads(other))
        assert fetch_all(tier, hashes) == payloads(hashes)
        assert tier.offer(other, payloads(other)) == 2

    def test_dropped_blocks_are_gone(self, tier: Tier) -> None:
        hashes = chain(1, 4)
        tier.offer(hashes, payloads(hashes))

        assert tier.drop(hashes[2:]) >= 2
        assert tier.contains(hashes) == [True, True, False, False]
        assert tier.drop() >= 2
        assert tier.contains(hashes) == [False] * 4

    def test_a_lease_outlives_a_drop(self, tier: Tier) -> None:
        hashes = chain(1, 4)
        tier.offer(hashes, payloads(hashes))
        with tier.match(hashes) as lease:
            tier.drop()
            if lease.has_views:
                for seed in range(100, 100 + 2 * CAPACITY_BLOCKS):
                    tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
                assert [bytes(view) for view in lease.views()] == payloads(hashes)

    def test_a_lease_refuses_use_after_its_end(self, tier: Tier) -> None:
        hashes = chain(1, 2)
        tier.offer(hashes, payloads(hashes))
        lease = tier.match(hashes)
        views = lease.views() if lease.has_views else []
        lease.release()
        lease.release()

        with pytest.raises(LeaseError):
            lease.fetch(empty_buffers(2))
        for view in views:
            with pytest.raises(ValueError, match="released"):
                bytes(view)

    def test_views_are_read_only_and_hold_the_bytes(self, tier: Tier) -> None:
        hashes = chain(1, 3)
        tier.offer(hashes, payloads(hashes))
        with tier.match(hashes) as lease:
            if not lease.has_views:
                pytest.skip("this tier has no views")
            assert all(view.readonly for view in lease.views())
            assert [bytes(view) for view in lease.views()] == payloads(hashes)

    def test_a_lease_with_exported_views_does_not_end(self, tier: Tier) -> None:
        hashes = chain(1, 1)
        tier.offer(hashes, payloads(hashes))
        lease = tier.match(hashes)
        if not lease.has_views:
            lease.release()
            pytest.skip("this tier has no views")
        export = memoryview(lease.views()[0])
        with pytest.raises(LeaseError):
            lease.release()
        for seed in range(100, 100 + 2 * CAPACITY_BLOCKS):
            tier.offer(chain(seed, 1), payloads(chain(seed, 1)))
        assert bytes(export) == payload(hashes[0])
        export.release()
        lease.release()

    def test_buffers_of_another_size_are_refused_before_anything_is_written(self, tier: Tier) -> None:
        hashes = chain(1, 2)
        with pytest.raises(ConfigError):
            tier.offer(hashes, [bytes(LAYOUT.block_bytes), bytes(10)])
        assert tier.contains(hashes) == [False, False]
        tier.offer(hashes, payloads(hashes))
        with tier.match(hashes) as lease, pytest.raises(ConfigError):
            lease.fetch([bytearray(5), bytearray(5)])

    def test_fewer_hashes_than_blocks_are_refused(self, tier: Tier) -> None:
        with pytest.raises(ConfigError):
            tier.offer(chain(1, 2), payloads(chain(1, 3)))

    def test_threads_never_see_a_wrong_byte(self, tier: Tier) -> None:
        failures: list[str] = []

        def work(number: int) -> None:
            dice = random.Random(number)
            for _ in range(40):
                hashes = chain(dice.randrange(12), dice.randrange(1, 9))
                try:
                    tier.offer(hashes, payloads(hashes))
                except CapacityError:
                    pass
                got = fetch_all(tier, hashes)
                if got != payloads(hashes)[: len(got)]:
                    failures.append(f"thread {number} read wrong bytes")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
