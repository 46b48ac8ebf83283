"""Ordered tiers as one cache that can only help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import ConfigError, LeaseError, RemoteProtocolError, TierFull, TierTimeout, TierUnavailable
from kvtier.testing.faults import CorruptingTier, FailingTier, SlowTier, TruncatingTier, WrappedTier
from kvtier.testing.tier_contract import LAYOUT, chain, empty_buffers, payloads
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.tier import Tier

MakeTier = Callable[..., HostTier]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    with contextlib.ExitStack() as stack:

        def make(name: str = "host", hashes: list[BlockHash] | None = None, num_blocks: int = 16) -> HostTier:
            tier = stack.enter_context(contextlib.closing(HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes, name)))
            tier.offer(hashes or [], payloads(hashes or []))
            return tier

        yield make


def fetched(hierarchy: Hierarchy, hashes: list[BlockHash]) -> list[bytes]:
    into = empty_buffers(len(hashes))
    with hierarchy.match(hashes) as lease:
        arrived = lease.fetch(into)
    return [bytes(buffer) for buffer in into[:arrived]]


def matched(hierarchy: Hierarchy, hashes: list[BlockHash]) -> dict[str, int]:
    with hierarchy.match(hashes) as lease:
        return lease.blocks_by_tier


def failures(hierarchy: Hierarchy, **labels: str) -> float:
    return hierarchy.metrics.value(hierarchy.metrics.failures, **labels)


# --- tiers together ------------------------------------------------------------------------------------------------


def test_each_block_comes_from_the_fastest_tier_that_has_it(make_tier: MakeTier) -> None:
    hashes = chain(1, 6)
    hierarchy = Hierarchy([make_tier("fast", hashes[:2]), make_tier("slow", hashes[:5])])

    with hierarchy.match(hashes) as lease:
        assert lease.num_blocks == 5
        assert lease.blocks_by_tier == {"fast": 2, "slow": 3}
        assert lease.ended is MatchEnd.NEVER_STORED
    assert fetched(hierarchy, hashes) == payloads(hashes[:5])


def test_a_slower_tier_is_not_asked_for_what_a_faster_one_has(make_tier: MakeTier) -> None:
    hashes = chain(1, 3)
    slow = FailingTier(make_tier("slow"))
    hierarchy = Hierarchy([make_tier("fast", hashes), slow])

    with hierarchy.match(hashes) as lease:
        assert lease.ended is MatchEnd.ALL
    assert slow.num_calls == 0


def test_a_gap_in_the_faster_tier_is_bridged_by_the_slower_one_only_from_there_on(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    hierarchy = Hierarchy([make_tier("fast", [hashes[0], hashes[3]]), make_tier("slow", hashes)])

    assert matched(hierarchy, hashes) == {"fast": 1, "slow": 3}


def test_hits_and_misses_are_counted_by_tier(make_tier: MakeTier) -> None:
    hashes = chain(1, 6)
    hierarchy = Hierarchy([make_tier("fast", hashes[:2]), make_tier("slow", hashes[:5])])
    matched(hierarchy, hashes)
    metrics = hierarchy.metrics

    assert metrics.value(metrics.hit_blocks, tier="fast") == 2
    assert metrics.value(metrics.missed_blocks, tier="fast") == 4
    assert metrics.value(metrics.hit_blocks, tier="slow") == 3
    assert metrics.value(metrics.missed_blocks, tier="slow") == 1


def test_a_match_of_no_hashes_is_a_match_of_all_of_them(make_tier: MakeTier) -> None:
    with Hierarchy([make_tier()]).match([]) as lease:
        assert (lease.num_blocks, lease.ended, lease.fetch([])) == (0, MatchEnd.ALL, 0)


def test_an_offer_goes_to_every_tier(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    fast, slow = make_tier("fast", hashes[:1]), make_tier("slow")
    hierarchy = Hierarchy([fast, slow])

    assert hierarchy.offer(hashes, payloads(hashes)) == {"fast": 3, "slow": 4}
    assert fast.contains(hashes) == slow.contains(hashes) == [True] * 4
    assert hierarchy.metrics.value(hierarchy.metrics.stored_blocks) == 7


def test_a_full_tier_refuses_without_failing(make_tier: MakeTier) -> None:
    held = chain(2, 1)
    full = make_tier("full", held, num_blocks=1)
    hierarchy = Hierarchy([full, make_tier("free")])
    with full.match(held):
        stored = hierarchy.offer(chain(1, 3), payloads(chain(1, 3)))

    assert stored == {"full": 0, "free": 3}
    assert hierarchy.metrics.value(hierarchy.metrics.refused_blocks, tier="full") == 3
    assert failures(hierarchy) == 0


def test_any_tier_may_contain_a_block(make_tier: MakeTier) -> None:
    hashes = chain(1, 3)
    hierarchy = Hierarchy([make_tier("fast", hashes[:1]), make_tier("slow", hashes[2:])])

    assert hierarchy.contains(hashes) == [True, False, True]


def test_tiers_with_other_layouts_are_refused(make_tier: MakeTier) -> None:
    other = replace(LAYOUT, dtype="bfloat16")
    with contextlib.closing(HostTier(other, other.slot_bytes, "other")) as tier:
        with pytest.raises(ConfigError, match="layout"):
            Hierarchy([make_tier("host"), tier])


def test_tiers_with_one_name_are_refused(make_tier: MakeTier) -> None:
    with pytest.raises(ConfigError, match="same name"):
        Hierarchy([make_tier("host"), make_tier("host")])


# --- promotion -----------------------------------------------------------------------------------------------------


def test_what_is_fetched_from_a_slower_tier_is_copied_into_the_faster_one(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    hierarchy = Hierarchy([make_tier("fast", hashes[:1]), make_tier("slow", hashes)])

    assert fetched(hierarchy, hashes) == payloads(hashes)

    assert matched(hierarchy, hashes) == {"fast": 4}
    assert fetched(hierarchy, hashes) == payloads(hashes)


def test_a_hierarchy_that_does_not_promote_leaves_tiers_as_they_are(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    hierarchy = Hierarchy([make_tier("fast"), make_tier("slow", hashes)], promotes=False)

    assert fetched(hierarchy, hashes) == payloads(hashes)
    assert matched(hierarchy, hashes) == {"slow": 4}


def test_a_match_alone_promotes_nothing(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    hierarchy = Hierarchy([make_tier("fast"), make_tier("slow", hashes)])
    matched(hierarchy, hashes)

    assert matched(hierarchy, hashes) == {"slow": 4}


def test_a_faster_tier_that_fails_to_take_a_promotion_does_not_fail_the_fetch(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    fast = FailingTier(make_tier("fast"))
    fast.is_failing = False
    hierarchy = Hierarchy([fast, make_tier("slow", hashes)])
    into = empty_buffers(4)
    with hierarchy.match(hashes) as lease:
        fast.is_failing = True
        assert lease.fetch(into) == 4

    assert [bytes(buffer) for buffer in into] == payloads(hashes)
    assert failures(hierarchy, tier="fast", kind="unavailable") == 1


# --- failing tiers -------------------------------------------------------------------------------------------------


def test_a_hierarchy_of_failing_tiers_answers_with_nothing(make_tier: MakeTier) -> None:
    hashes = chain(1, 2)
    hierarchy = Hierarchy([FailingTier(make_tier("only"))])

    assert fetched(hierarchy, hashes) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda hierarchy: hierarchy.match(chain(1, 2)).release(),
        lambda hierarchy: hierarchy.offer(chain(1, 2), payloads(chain(1, 2))),
        lambda hierarchy: hierarchy.contains(chain(1, 2)),
    ],
    ids=["match", "offer", "contains"],
)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TierUnavailable("gone"), "unavailable"),
        (TierTimeout("slow"), "timeout"),
        (OSError("disk"), "io"),
        (RemoteProtocolError("garbage"), "protocol"),
    ],
    ids=["unavailable", "timeout", "io", "protocol"],
)
def test_a_tiers_failure_is_counted_by_kind_and_raised_to_nobody(
    make_tier: MakeTier, call: Callable[[Hierarchy], object], error: Exception, kind: str
) -> None:
    hierarchy = Hierarchy([FailingTier(make_tier("bad"), lambda: error)])

    call(hierarchy)

    assert failures(hierarchy) == failures(hierarchy, tier="bad", kind=kind) == 1


def test_the_other_tiers_answer_for_one_that_fails(make_tier: MakeTier) -> None:
    hashes = chain(1, 3)
    hierarchy = Hierarchy([FailingTier(make_tier("bad")), make_tier("good", hashes)])

    assert fetched(hierarchy, hashes) == payloads(hashes)
    assert hierarchy.contains(hashes) == [True] * 3
    assert hierarchy.offer(chain(2, 1), payloads(chain(2, 1))) == {"bad": 0, "good": 1}


def test_a_failed_tier_rests_and_is_used_again(make_tier: MakeTier) -> None:
    hashes = chain(1, 3)
    clock = Clock()
    tier = FailingTier(make_tier("weak", hashes))
    hierarchy = Hierarchy([tier], clock=clock)
    matched(hierarchy, hashes)
    tier.is_failing = False

    assert matched(hierarchy, hashes) == {}
    assert tier.num_calls == 1
    clock.now_s += 0.1
    assert matched(hierarchy, hashes) == {"weak": 3}
    assert failures(hierarchy) == 1


def test_a_tier_that_keeps_failing_rests_longer_each_time_up_to_five_seconds(make_tier: MakeTier) -> None:
    clock = Clock()
    tier = FailingTier(make_tier("weak"))
    hierarchy = Hierarchy([tier], clock=clock)
    rests_s = []
    for _ in range(9):
        matched(hierarchy, chain(1, 1))
        began_at, num_calls = clock.now_s, tier.num_calls
        while tier.num_calls == num_calls:
            clock.now_s = round(clock.now_s + 0.1, 3)
            hierarchy.contains(chain(1, 1))
        rests_s.append(round(clock.now_s - began_at, 3))
        clock.now_s += 100

    assert rests_s[0] == pytest.approx(0.1)
    assert rests_s == sorted(rests_s)
    assert rests_s[-1] == pytest.approx(5.0)


def test_one_success_makes_the_next_rest_short_again(make_tier: MakeTier) -> None:
    clock = Clock()
    tier = FailingTier(make_tier("weak"))
    hierarchy = Hierarchy([tier], clock=clock)
    for _ in range(5):
        matched(hierarchy, chain(1, 1))
        clock.now_s += 10
    tier.is_failing = False
    matched(hierarchy, chain(1, 1))
    tier.is_failing = True
    matched(hierarchy, chain(1, 1))
    num_calls = tier.num_calls
    clock.now_s += 0.11
    matched(hierarchy, chain(1, 1))

    assert tier.num_calls == num_calls + 1


def test_while_its_tier_rests_a_match_says_that_it_is_down(make_tier: MakeTier) -> None:
    hierarchy = Hierarchy([FailingTier(make_tier("weak"))], clock=Clock())
    matched(hierarchy, chain(1, 1))

    with hierarchy.match(chain(1, 1)) as lease:
        assert lease.ended is MatchEnd.TIER_DOWN


def test_a_match_in_which_its_tier_fails_says_that_it_is_down(make_tier: MakeTier) -> None:
    with Hierarchy([FailingTier(make_tier("weak"))]).match(chain(1, 1)) as lease:
        assert lease.ended is MatchEnd.TIER_DOWN


@pytest.mark.parametrize("num_delivered", [0, 1, 2])
def test_a_tier_that_delivers_less_than_it_leased_ends_the_fetch_there(make_tier: MakeTier, num_delivered: int) -> None:
    hashes = chain(1, 5)
    short = TruncatingTier(make_tier("short", hashes[:4]), num_delivered)
    hierarchy = Hierarchy([make_tier("fast", hashes[:1]), short, make_tier("last", hashes)])

    assert fetched(hierarchy, hashes) == payloads(hashes[: 1 + num_delivered])


def test_only_what_was_delivered_is_promoted(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    fast = make_tier("fast")
    hierarchy = Hierarchy([fast, TruncatingTier(make_tier("short", hashes), 2)])
    fetched(hierarchy, hashes)

    assert fast.contains(hashes) == [True, True, False, False]


def test_a_fetch_that_fails_midway_counts_and_promotes_nothing_of_that_tier(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    fast = make_tier("fast", hashes[:1])
    hierarchy = Hierarchy([fast, TruncatingTier(make_tier("short", hashes), 2, TierTimeout("injected"))])

    assert fetched(hierarchy, hashes) == payloads(hashes[:1])
    assert failures(hierarchy, tier="short", kind="timeout") == 1
    assert fast.contains(hashes) == [True, False, False, False]


def test_a_corrupting_tier_shows_that_its_bytes_reach_the_caller(make_tier: MakeTier) -> None:
    """The wrapper is of use to stores with checksums; a tier without them must at least be seen through it."""
    hashes = chain(1, 2)
    good, bad = payloads(hashes), fetched(Hierarchy([CorruptingTier(make_tier("bad", hashes))]), hashes)

    assert [one[1:] for one in good] == [one[1:] for one in bad]
    assert [one[0] ^ 1 for one in good] == [one[0] for one in bad]


def test_a_slow_tier_changes_nothing_but_time(make_tier: MakeTier) -> None:
    hashes = chain(1, 2)
    slept_s: list[float] = []
    hierarchy = Hierarchy([SlowTier(make_tier("slow", hashes), 0.25, slept_s.append)])

    assert fetched(hierarchy, hashes) == payloads(hashes)
    assert slept_s == [0.25]


# --- leases and mistakes -------------------------------------------------------------------------------------------


def test_what_is_leased_in_any_tier_survives_a_flood(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    fast, slow = make_tier("fast", hashes[:2], num_blocks=6), make_tier("slow", hashes, num_blocks=6)
    hierarchy = Hierarchy([fast, slow], promotes=False)
    into = empty_buffers(4)
    with hierarchy.match(hashes) as lease:
        for seed in range(100, 120):
            hierarchy.offer(chain(seed, 1), payloads(chain(seed, 1)))
        assert lease.fetch(into) == 4

    assert [bytes(buffer) for buffer in into] == payloads(hashes)


def test_a_lease_that_was_released_is_of_no_use_and_holds_nothing(make_tier: MakeTier) -> None:
    hashes = chain(1, 2)
    tier = make_tier("host", hashes, num_blocks=2)
    lease = Hierarchy([tier]).match(hashes)
    lease.release()
    lease.release()

    with pytest.raises(LeaseError, match="has ended"):
        lease.fetch(empty_buffers(2))
    assert tier.offer(chain(2, 2), payloads(chain(2, 2))) == 2


@pytest.mark.parametrize("num_buffers", [0, 1, 3])
def test_fewer_buffers_than_blocks_are_filled_as_far_as_they_go(make_tier: MakeTier, num_buffers: int) -> None:
    hashes = chain(1, 4)
    hierarchy = Hierarchy([make_tier("fast", hashes[:2]), make_tier("slow", hashes)])
    into = empty_buffers(num_buffers)
    with hierarchy.match(hashes) as lease:
        assert lease.fetch(into) == num_buffers

    assert [bytes(buffer) for buffer in into] == payloads(hashes[:num_buffers])


def test_a_callers_mistake_is_the_callers_and_rests_no_tier(make_tier: MakeTier) -> None:
    hierarchy = Hierarchy([make_tier("host")])
    with pytest.raises(ConfigError):
        hierarchy.offer(chain(1, 2), [bytes(3), bytes(3)])

    assert failures(hierarchy) == 0
    assert hierarchy.offer(chain(1, 2), payloads(chain(1, 2))) == {"host": 2}


def test_closing_closes_every_tier() -> None:
    closed: list[str] = []

    class Noted(WrappedTier):
        def close(self) -> None:
            closed.append(self.name)
            super().close()

    tiers: list[Tier] = [Noted(HostTier(LAYOUT, LAYOUT.slot_bytes, name)) for name in ("fast", "slow")]
    Hierarchy(tiers).close()

    assert closed == ["fast", "slow"]


def test_a_tier_full_of_leases_is_full_and_not_failed(make_tier: MakeTier) -> None:
    tier = FailingTier(make_tier("full"), lambda: TierFull("injected"))
    hierarchy = Hierarchy([tier])

    assert hierarchy.offer(chain(1, 2), payloads(chain(1, 2))) == {"full": 0}
    assert hierarchy.offer(chain(1, 2), payloads(chain(1, 2))) == {"full": 0}
    assert tier.num_calls == 2
