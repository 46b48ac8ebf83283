"""Ordered tiers as one cache that can only help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.retention import Granted
from kvtier.errors import ConfigError, RemoteProtocolError, TierTimeout, TierUnavailable
from kvtier.testing.faults import CorruptingTier, FailingTier, SlowTier, TruncatingTier, WrappedTier
from kvtier.testing.tier_contract import LAYOUT, chain, empty_buffers, fetch_all, payloads
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.retention import RetentionAsk
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


def matched(hierarchy: Hierarchy, hashes: list[BlockHash]) -> dict[str, int]:
    with hierarchy.match(hashes) as lease:
        hierarchy.count(lease, len(hashes))
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
        assert [bytes(view) for segment in lease.segments for view in segment.lease.views()] == payloads(hashes[:5])


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


def test_of_a_prompt_as_much_is_worth_storing_as_the_largest_tier_can_keep(make_tier: MakeTier) -> None:
    """A tier with more below it, or whose memory is unknown, keeps all."""
    small, large = make_tier("small", num_blocks=4), make_tier("large", num_blocks=16)

    assert Hierarchy([small]).most_prompt_blocks == 3
    assert Hierarchy([small, large]).most_prompt_blocks == 14
    assert Hierarchy([small, WrappedTier(large)]).most_prompt_blocks is None
    assert Hierarchy([]).most_prompt_blocks is None


def test_a_match_of_no_hashes_is_a_match_of_all_of_them(make_tier: MakeTier) -> None:
    with Hierarchy([make_tier()]).match([]) as lease:
        assert (lease.num_blocks, lease.ended) == (0, MatchEnd.ALL)


def test_tiers_with_other_layouts_are_refused(make_tier: MakeTier) -> None:
    other = replace(LAYOUT, dtype="bfloat16")
    with contextlib.closing(HostTier(other, other.slot_bytes, "other")) as tier:
        with pytest.raises(ConfigError, match="layout"):
            Hierarchy([make_tier("host"), tier])


def test_tiers_with_one_name_are_refused(make_tier: MakeTier) -> None:
    with pytest.raises(ConfigError, match="same name"):
        Hierarchy([make_tier("host"), make_tier("host")])


def test_of_what_several_tiers_say_of_a_block_the_most_telling_is_kept(make_tier: MakeTier) -> None:
    hashes = chain(1, 3)
    fast = make_tier("fast", hashes, num_blocks=3)
    fast.offer(chain(2, 2), payloads(chain(2, 2)))  # evicts the end of the first chain
    hierarchy = Hierarchy([fast, FailingTier(make_tier("away")), make_tier("slow")])
    with hierarchy.match(hashes) as lease:
        assert (lease.ending.tier, lease.ended) == ("away", MatchEnd.TIER_DOWN)

    hierarchy = Hierarchy([fast, make_tier("slow")])
    with hierarchy.match(hashes) as lease:
        assert (lease.ending.tier, lease.ended) == ("fast", MatchEnd.EVICTED)


# --- capabilities --------------------------------------------------------------------------------------------------


def test_the_host_is_the_tier_that_others_blocks_pass_through(make_tier: MakeTier) -> None:
    host = make_tier("host")

    assert Hierarchy([WrappedTier(make_tier("wrapped")), host]).host is host
    assert Hierarchy([WrappedTier(host)]).host is None


def test_a_wrapped_tier_claims_no_capability(make_tier: MakeTier) -> None:
    wrapped = WrappedTier(make_tier())

    assert (wrapped.answers_at_once, wrapped.is_local, wrapped.keeps_notes) == (False, False, False)
    assert (wrapped.arena, wrapped.staging, wrapped.generation) == (None, None, 0)


# --- failing tiers -------------------------------------------------------------------------------------------------


def test_a_hierarchy_of_failing_tiers_answers_with_nothing(make_tier: MakeTier) -> None:
    hashes = chain(1, 2)
    hierarchy = Hierarchy([FailingTier(make_tier("only"))])

    assert matched(hierarchy, hashes) == {}


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
    make_tier: MakeTier, error: Exception, kind: str
) -> None:
    hierarchy = Hierarchy([FailingTier(make_tier("bad"), lambda: error)])

    hierarchy.match(chain(1, 2)).release()

    assert failures(hierarchy) == failures(hierarchy, tier="bad", kind=kind) == 1


def test_the_other_tiers_answer_for_one_that_fails(make_tier: MakeTier) -> None:
    hashes = chain(1, 3)
    hierarchy = Hierarchy([FailingTier(make_tier("bad")), make_tier("good", hashes)])

    assert matched(hierarchy, hashes) == {"good": 3}


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
            matched(hierarchy, chain(1, 1))
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


def test_a_truncating_tier_delivers_less_than_it_leased(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    into = empty_buffers(4)
    with TruncatingTier(make_tier("short", hashes), 2).match(hashes) as lease:
        assert (lease.num_blocks, lease.fetch(into)) == (4, 2)
    with TruncatingTier(make_tier("bad", hashes), 2, TierTimeout("injected")).match(hashes) as lease:
        with pytest.raises(TierTimeout, match="injected"):
            lease.fetch(into)

    assert [bytes(buffer) for buffer in into[:2]] == payloads(hashes[:2])


def test_a_corrupting_tier_shows_that_its_bytes_reach_the_caller(make_tier: MakeTier) -> None:
    """The wrapper is of use to stores with checksums; a tier without them must at least be seen through it."""
    hashes = chain(1, 2)
    good, bad = payloads(hashes), fetch_all(CorruptingTier(make_tier("bad", hashes)), hashes)

    assert [one[1:] for one in good] == [one[1:] for one in bad]
    assert [one[0] ^ 1 for one in good] == [one[0] for one in bad]


def test_a_slow_tier_changes_nothing_but_time(make_tier: MakeTier) -> None:
    hashes = chain(1, 2)
    slept_s: list[float] = []
    slow = SlowTier(make_tier("slow", hashes), 0.25, slept_s.append)

    assert fetch_all(slow, hashes) == payloads(hashes)
    assert slept_s == [0.25]


# --- leases and mistakes -------------------------------------------------------------------------------------------


def test_what_is_leased_in_any_tier_survives_a_flood(make_tier: MakeTier) -> None:
    hashes = chain(1, 4)
    fast, slow = make_tier("fast", hashes[:2], num_blocks=6), make_tier("slow", hashes, num_blocks=6)
    with Hierarchy([fast, slow]).match(hashes) as lease:
        for seed in range(100, 120):
            fast.offer(chain(seed, 1), payloads(chain(seed, 1)))
            slow.offer(chain(seed, 1), payloads(chain(seed, 1)))
        assert [bytes(view) for segment in lease.segments for view in segment.lease.views()] == payloads(hashes)


def test_a_lease_that_was_released_holds_nothing(make_tier: MakeTier) -> None:
    hashes = chain(1, 2)
    tier = make_tier("host", hashes, num_blocks=2)
    lease = Hierarchy([tier]).match(hashes)
    lease.release()
    lease.release()

    assert tier.offer(chain(2, 2), payloads(chain(2, 2))) == 2


def test_a_callers_mistake_is_the_callers_and_rests_no_tier(make_tier: MakeTier) -> None:
    hierarchy = Hierarchy([make_tier("host")])
    (guard,) = hierarchy.guards
    with pytest.raises(ConfigError), guard.watched():
        guard.tier.offer(chain(1, 2), [bytes(3), bytes(3)])

    assert failures(hierarchy) == 0
    assert not guard.is_resting


def test_closing_closes_every_tier() -> None:
    closed: list[str] = []

    class Noted(WrappedTier):
        def close(self) -> None:
            closed.append(self.name)
            super().close()

    tiers: list[Tier] = [Noted(HostTier(LAYOUT, LAYOUT.slot_bytes, name)) for name in ("fast", "slow")]
    Hierarchy(tiers).close()

    assert closed == ["fast", "slow"]


class Granting(WrappedTier):
    """Says `granted` of every retention."""

    def __init__(self, name: str, granted: Granted) -> None:
        super().__init__(HostTier(LAYOUT, LAYOUT.slot_bytes, name))
        self.granted = granted

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> Granted:
        return self.granted


FULL, PART, REFUSED, NEVER = Granted(4, 60.0), Granted(2, 60.0, "no room"), Granted(0, 0.0, "why"), Granted(0, 0.0)


@pytest.mark.parametrize(
    ("said", "best"),
    [
        ((FULL, NEVER), 0),
        ((NEVER, FULL), 1),
        ((FULL, PART), 0),
        ((PART, NEVER), 0),
        ((PART, FULL), 1),
        ((REFUSED, NEVER), 0),
        ((NEVER, REFUSED), 1),
    ],
)
def test_of_a_retention_the_tier_that_keeps_most_has_the_word(said: tuple[Granted, Granted], best: int) -> None:
    hierarchy = Hierarchy([Granting("first", said[0]), Granting("second", said[1])])
    with contextlib.closing(hierarchy):
        found = hierarchy.retain(chain(1, 4), RetentionAsk(ttl_s=60.0))

    assert found == (("first", "second")[best], said[best])
