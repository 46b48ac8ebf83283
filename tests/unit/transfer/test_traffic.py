"""Matches and loads from real tiers, the decision for them by a clock of the test's, and tiers that fail on the way."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierTimeout
from kvtier.testing.faults import FailingTier, TruncatingTier
from kvtier.testing.tier_contract import LAYOUT, chain, payloads
from kvtier.tiers.tier import Tier
from kvtier.transfer.load import Load, LoadPlan, Order
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.transfer import Transfer
from tests.support.host_device import Past
from tests.support.traffic_bench import Bench, FarTier, Open, computes, loads
from tests.support.waiting import wait_until as until

# --- matching ----------------------------------------


def test_a_match_names_the_blocks_of_the_prompt_that_each_tier_has(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    hashes = chain(1, 8)
    bench.host.offer(hashes[:4], payloads(hashes[:4]))
    far.offer(hashes[:6], payloads(hashes[:6]))

    fetch = bench.match(hashes, first=2)

    assert [(span.tier, span.first, span.end) for span in fetch.spans] == [("host", 2, 4), ("far", 4, 6)]
    assert fetch.end == 6
    assert (fetch.ending.position, fetch.ending.ended) == (6, MatchEnd.NEVER_STORED)
    bench.traffic.matcher.give_up(fetch)
    until(bench.is_free)


def test_a_match_of_nothing_needs_no_tier(open_bench: Open) -> None:
    fetch = open_bench(FailingTier(FarTier())).traffic.matcher.match(3, [])

    assert not fetch.is_matching
    assert fetch.end == 3


@pytest.mark.parametrize("is_far", [False, True])
def test_a_lease_is_given_back_once_its_owner_and_its_loads_are_done(open_bench: Open, is_far: bool) -> None:
    far = FarTier()
    bench = open_bench(far)
    hashes = chain(1, 4)
    (far if is_far else bench.host).offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)
    bench.device.gate.clear()
    load = bench.load(fetch, hashes)
    bench.traffic.matcher.give_up(fetch)
    until(lambda: bool(bench.device.transfers))
    assert fetch.leases

    bench.device.gate.set()
    until(lambda: load.is_over and not fetch.leases)

    assert fetch.num_users == 0
    assert all(lease.num_released == 1 for lease in far.leases)
    until(bench.is_free)


def test_a_match_that_is_given_up_before_it_is_answered_leases_nothing_for_long(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    hashes = chain(1, 4)
    far.offer(hashes, payloads(hashes))
    fetches = [bench.traffic.matcher.match(0, hashes) for _ in range(20)]
    for fetch in fetches:
        bench.traffic.matcher.give_up(fetch)

    until(lambda: all(not fetch.is_matching and not fetch.leases for fetch in fetches))
    assert all(lease.num_released == 1 for lease in far.leases)


def test_a_failing_tier_is_no_hit(open_bench: Open) -> None:
    bench = open_bench(FailingTier(FarTier()))
    fetch = bench.match(chain(1, 3))

    assert fetch.spans == []
    assert fetch.ending.ended is MatchEnd.TIER_DOWN
    bench.traffic.matcher.give_up(fetch)


# --- blocks that are just being computed ----------------------------------------


def test_a_match_waits_for_what_is_being_written(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    with bench.host.reserve(hashes) as reservation:
        fetch = bench.traffic.matcher.match(0, hashes)
        time.sleep(0.02)
        assert fetch.is_matching
        reservation.fill(payloads(hashes))
        reservation.commit()
    until(lambda: not fetch.is_matching)

    assert fetch.end == 2
    bench.traffic.matcher.give_up(fetch)
    until(bench.is_free)


def test_a_match_waits_no_longer_than_computing_would_take(open_bench: Open) -> None:
    bench = open_bench()
    computes(bench.speeds, 0.01)
    hashes = chain(1, 2)
    with bench.host.reserve(hashes):
        fetch = bench.traffic.matcher.match(0, hashes)
        time.sleep(0.02)
        assert fetch.is_matching
        bench.now[0] = 0.5
        until(lambda: not fetch.is_matching)

    assert fetch.ending.ended is MatchEnd.PENDING
    bench.traffic.matcher.give_up(fetch)


def test_a_match_that_is_given_up_stops_waiting(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    with bench.host.reserve(hashes):
        fetch = bench.traffic.matcher.match(0, hashes)
        bench.traffic.matcher.give_up(fetch)

        until(lambda: not fetch.is_matching)
    until(lambda: fetch.num_users == 0 and not fetch.leases)


# --- loading ----------------------------------------


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("is_far", [False, True])
def test_a_load_brings_every_byte(open_bench: Open, order: Order, is_far: bool) -> None:
    if order is Order.BACK and not is_far:
        pytest.skip("what is in this host's memory comes in order")
    far = FarTier()
    bench = open_bench(far)
    hashes = chain(1, 7)
    (far if is_far else bench.host).offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)

    load = bench.load(fetch, hashes, order)
    until(lambda: load.is_over)

    assert load.is_submitted
    assert load.arrived() == (0, 7)
    assert bench.loaded(hashes) == [True] * 7
    assert bench.speeds.load_s("far" if is_far else "host", 1000) is not None
    bench.traffic.matcher.give_up(fetch)
    until(bench.is_free)


def test_what_is_loaded_from_afar_is_in_the_hosts_tier_from_then_on(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    hashes = chain(1, 5)
    far.offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)
    load = bench.load(fetch, hashes)
    until(lambda: load.is_over)

    assert bench.host.contains(hashes) == [True] * 5
    bench.traffic.matcher.give_up(fetch)


@pytest.mark.parametrize("error", [None, TierTimeout("injected")])
@pytest.mark.parametrize("order", list(Order))
def test_of_a_load_that_breaks_off_only_what_came_counts(
    open_bench: Open, order: Order, error: TierTimeout | None
) -> None:
    far = TruncatingTier(FarTier(), 3, error)
    bench = open_bench(far)
    hashes = chain(1, 6)
    far.offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)

    load = bench.load(fetch, hashes, order)
    until(lambda: load.is_over)

    first, end = load.arrived()
    expected = {(Order.FRONT, False): (0, 3), (Order.FRONT, True): (0, 0)}
    assert (first, end) == expected.get((order, error is not None), (6, 6))
    assert not load.is_submitted
    assert all(bench.loaded(hashes)[first:end])
    bench.traffic.matcher.give_up(fetch)
    until(bench.is_free)


def test_a_load_without_room_in_the_hosts_tier_brings_nothing_and_ends(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far, num_blocks=2)
    hashes, kept = chain(1, 4), chain(2, 2)
    far.offer(hashes, payloads(hashes))
    bench.host.offer(kept, payloads(kept))
    fetch = bench.match(hashes)
    with bench.host.match(kept):
        load = bench.load(fetch, hashes)
        until(lambda: load.is_over)

    assert load.num_arrived == 0
    bench.traffic.matcher.give_up(fetch)


def test_a_load_waits_for_the_step_that_used_its_blocks_and_for_no_later_one(open_bench: Open) -> None:
    """The device is at step 2 of 4, which may take long."""
    bench = open_bench()
    marks = _marks_of(bench)
    for number in range(4):
        bench.traffic.marks.note_step()
        marks[0].is_past = number >= 2
    hashes = chain(1, 2)
    bench.host.offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)
    span = fetch.spans[0]
    plan = LoadPlan(span, 0, 2, Order.FRONT, None, 2)

    loads = [bench.traffic.loading.load(fetch, plan, hashes, [0, 1], after_step) for after_step in range(5)]

    assert [load.after.query() for load in loads] == [True, True, False, False, False]
    assert [load.after for load in loads[2:]] == marks[1:]
    for load in loads:
        until(lambda load=load: load.is_over)  # type: ignore[misc]
    bench.traffic.matcher.give_up(fetch)


def test_a_load_that_waits_for_a_step_says_nothing_of_its_tier(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    bench.host.offer(hashes, payloads(hashes))
    noted: list[float] = []
    note_load = bench.speeds.note_load

    def note(tier: str, nbytes: int, seconds: float) -> None:
        noted.append(seconds)
        note_load(tier, nbytes, seconds)

    bench.speeds.note_load = note  # type: ignore[method-assign]
    mark = _Mark()
    bench.device.mark = lambda: mark  # type: ignore[method-assign]
    bench.traffic.marks.note_step()
    num_noted = []
    for is_past in (False, False, True, False):  # the first is the only one that is known of, the last a fast one
        mark.is_past = is_past
        if len(num_noted) == 3:
            bench.speeds.load_s = lambda tier, nbytes: 1e9  # type: ignore[method-assign]
        bench.traffic.decision.note_late("host")
        fetch = bench.match(hashes)
        span = fetch.spans[0]
        load = bench.traffic.loading.load(fetch, LoadPlan(span, 0, 2, Order.FRONT, None, 2), hashes, [0, 1], 1)
        until(lambda load=load: load.is_over)  # type: ignore[misc]
        bench.traffic.matcher.give_up(fetch)
        num_noted.append(len(noted))
        assert not bench.traffic.decision._is_resting("host"), "it came"

    assert num_noted == [1, 1, 2, 3]


def test_after_a_failure_loads_wait_for_all_that_the_device_was_given(open_bench: Open) -> None:
    """Also for a step that was handed over and not noted."""
    bench = open_bench()
    marks = _marks_of(bench)
    for _ in range(3):
        bench.traffic.marks.note_step()
    marks[0].is_past = True
    transfer = Transfer(bench.traffic, 4)
    transfer.start_over()
    hashes = chain(1, 2)
    bench.host.offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)

    plan = LoadPlan(fetch.spans[0], 0, 2, Order.FRONT, None, 2)
    load = bench.traffic.loading.load(fetch, plan, hashes, [0, 1], max(transfer._shared.last_steps))

    assert len(marks) == 4
    assert load.after is marks[-1]
    until(lambda: load.is_over)
    bench.traffic.matcher.give_up(fetch)


class _Mark:
    is_past = False

    def query(self) -> bool:
        return self.is_past


def _marks_of(bench: Bench) -> list[_Mark]:
    """All that are taken from now on."""
    marks: list[_Mark] = []

    def mark() -> _Mark:
        marks.append(_Mark())
        return marks[-1]

    bench.device.mark = mark  # type: ignore[method-assign]
    return marks


def test_an_abandoned_load_writes_no_more_and_what_is_under_way_precedes_the_next_step(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    hashes = chain(1, 16)
    far.offer(hashes, payloads(hashes))
    fetch = bench.match(hashes)
    bench.device.gate.clear()
    load = bench.load(fetch, hashes)
    until(lambda: bool(load.copies))

    bench.traffic.loading.abandon(load)
    num_begun = len(bench.device.transfers)
    bench.traffic.matcher.give_up(fetch)
    assert all(transfer.preceded for transfer in bench.device.transfers)
    bench.device.gate.set()
    until(lambda: load.is_over)

    assert len(bench.device.transfers) == num_begun
    until(bench.is_free)


def test_a_device_that_fails_ends_the_load(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    bench.host.offer(hashes, payloads(hashes))
    bench.device.error = TierTimeout("injected")
    fetch = bench.match(hashes)
    load = bench.load(fetch, hashes)
    until(lambda: load.is_over)

    assert load.num_arrived == 0
    bench.traffic.matcher.give_up(fetch)
    until(bench.is_free)


# --- the decision ----------------------------------------


def found(bench: Bench, tier: Tier, num_blocks: int = 16) -> TierMatch:
    hashes = chain(1, num_blocks)
    tier.offer(hashes, payloads(hashes))
    return bench.match(hashes)


@pytest.mark.parametrize(
    ("is_far", "load_s", "order"),
    [
        (False, 0.1, Order.FRONT),
        (True, 0.1, Order.FRONT),
        (False, 0.9, Order.FRONT),
        (True, 0.9, Order.BACK),
        (True, 2.0, Order.BACK),
        (False, 1.5, None),
        (True, 1000.0, None),
    ],
)
def test_what_is_loaded_depends_on_what_computing_takes(
    open_bench: Open, is_far: bool, load_s: float, order: Order | None
) -> None:
    """Against a second for each block that is computed."""
    far = FarTier()
    bench = open_bench(far)
    computes(bench.speeds, 1.0)
    loads(bench.speeds, "far" if is_far else "host", load_s)
    fetch = found(bench, far if is_far else bench.host)

    plan = bench.traffic.loading.plan(fetch, 0, 300)

    assert (None if plan is None else plan.order) is order
    bench.traffic.matcher.give_up(fetch)


def test_what_was_never_measured_is_loaded(open_bench: Open) -> None:
    bench = open_bench()
    fetch = found(bench, bench.host)

    plan = bench.traffic.loading.plan(fetch, 5, 300)

    assert plan is not None
    assert (plan.first, plan.end, plan.order) == (5, 16, Order.FRONT)
    assert bench.traffic.loading.plan(fetch, 16, 300) is None
    bench.traffic.matcher.give_up(fetch)


def test_a_slow_tier_is_tried_again_now_and_then(open_bench: Open) -> None:
    bench = open_bench()
    computes(bench.speeds, 1.0)
    loads(bench.speeds, "host", 5.0)
    fetch = found(bench, bench.host)

    assert bench.traffic.loading.plan(fetch, 0, 300) is None
    bench.now[0] = 5.0
    assert bench.traffic.loading.plan(fetch, 0, 300) is None
    bench.now[0] = 11.0
    assert bench.traffic.loading.plan(fetch, 0, 300) is not None
    assert bench.traffic.loading.plan(fetch, 0, 300) is None
    bench.traffic.matcher.give_up(fetch)


def test_without_a_decision_everything_is_loaded(open_bench: Open) -> None:
    bench = open_bench(always_loads=True)
    computes(bench.speeds, 1.0)
    loads(bench.speeds, "host", 100.0)
    fetch = found(bench, bench.host)

    plan = bench.traffic.loading.plan(fetch, 0, 300)

    assert plan is not None
    load = Load(plan, [], [], Past(), 0.0)
    bench.now[0] = 1e6
    assert not bench.traffic.loading.is_late(load, 300)
    bench.traffic.matcher.give_up(fetch)


def _load(bench: Bench, fetch: TierMatch, order: Order, expected_s: float) -> Load:
    """Nobody brings it."""
    span = fetch.spans[0]
    plan = LoadPlan(span, span.first, span.end, order, expected_s, 1)
    return Load(plan, [], list(range(span.end - span.first)), Past(), bench.now[0])


def test_a_load_is_late_when_computing_the_rest_is_faster(open_bench: Open) -> None:
    bench = open_bench()
    computes(bench.speeds, 0.1)
    fetch = found(bench, bench.host)
    load = _load(bench, fetch, Order.FRONT, 1.0)

    bench.now[0] = 1.0
    assert not bench.traffic.loading.is_late(load, 257)
    bench.now[0] = 1.2
    assert not bench.traffic.loading.is_late(load, 257), (
        "as far as is known it comes sooner than the 1.6 s of computing"
    )
    bench.now[0] = 3.0
    assert bench.traffic.loading.is_late(load, 257)
    load.submit_all()
    assert not bench.traffic.loading.is_late(load, 257)
    bench.traffic.matcher.give_up(fetch)


def test_a_load_behind_others_is_not_late_while_they_come(open_bench: Open) -> None:
    """Two hundred prompts at once: the last has to wait for all others, and must not be computed for that."""
    bench = open_bench()
    computes(bench.speeds, 0.1)
    fetch = found(bench, bench.host)
    load = _load(bench, fetch, Order.FRONT, 0.1)
    span = fetch.spans[0]
    for number in range(1, 6):
        bench.now[0] = 1.0 * number
        assert not bench.traffic.loading.is_late(load, 257)
        before = bench.traffic.loading.load(
            fetch, LoadPlan(span, 0, 2, Order.FRONT, 0.1, 1), fetch.hashes[:2], [0, 1], 0
        )
        until(functools.partial(getattr, before, "is_over"))

    assert not bench.traffic.loading.is_late(load, 257), "one came just now"
    bench.now[0] += 1.0
    assert not bench.traffic.loading.is_late(load, 257), "computing takes 1.6 s"
    bench.now[0] += 1.0
    assert bench.traffic.loading.is_late(load, 257), "nothing comes any more"
    load.times.picked_at = bench.now[0]
    assert not bench.traffic.loading.is_late(load, 257), "its turn has come"
    bench.now[0] += 2.0
    assert bench.traffic.loading.is_late(load, 257)
    bench.traffic.matcher.give_up(fetch)


def test_a_load_behind_others_that_wait_for_a_step_is_not_late(open_bench: Open) -> None:
    bench = open_bench()
    computes(bench.speeds, 0.1)
    fetch = found(bench, bench.host)
    load = _load(bench, fetch, Order.FRONT, 0.1)
    span = fetch.spans[0]
    mark = _Mark()
    bench.device.mark = lambda: mark  # type: ignore[method-assign]
    bench.traffic.marks.note_step()
    bench.device.gate.clear()
    before = bench.traffic.loading.load(fetch, LoadPlan(span, 0, 2, Order.FRONT, 0.1, 1), fetch.hashes[:2], [0, 1], 1)
    until(lambda: bool(before.copies))
    bench.now[0] = 100.0

    assert not bench.traffic.loading.is_late(load, 257), (
        "the device is at a step that used the blocks of the one before it"
    )
    mark.is_past = True
    assert bench.traffic.loading.is_late(load, 257), "the device is done with them, and nothing comes"
    mark.is_past = False
    bench.traffic.loading.abandon(before)
    assert bench.traffic.loading.is_late(load, 257), "nobody needs the one before"
    bench.device.gate.set()
    until(lambda: before.is_over and not bench.traffic.loading.num_loads)
    assert not bench.traffic.loading.is_late(load, 257), "one came just now"
    bench.now[0] = 200.0
    assert bench.traffic.loading.is_late(load, 257)
    bench.traffic.matcher.give_up(fetch)


def test_loads_from_memory_that_were_held_up_say_nothing_of_it_unless_many_were(open_bench: Open) -> None:
    bench = open_bench()
    fetch = found(bench, bench.host)
    load = _load(bench, fetch, Order.FRONT, 0.1)
    nbytes = 16 * LAYOUT.block_bytes

    def came_after(*times: float) -> float:
        for seconds in times:
            bench.traffic.loading._note_speed(load, 16, seconds, 1, has_room=True)
        known_s = bench.speeds.load_s("host", nbytes)
        assert known_s is not None
        return known_s

    assert came_after(0.1, 0.1, 0.1) == pytest.approx(0.1)
    assert came_after(*[5.0] * 8) == pytest.approx(0.1)
    assert came_after(0.2) == pytest.approx(0.1), "one that is twice as slow counts, as one of four"
    assert came_after(*[5.0] * 8) == pytest.approx(0.1)
    assert came_after(*[5.0] * 5) == pytest.approx(5.0), "thirteen in a row: it is slow"
    assert came_after(0.1) == pytest.approx(5.0)
    assert came_after(0.1, 0.1) == pytest.approx(0.1)
    bench.traffic.matcher.give_up(fetch)


def test_a_load_of_a_few_milliseconds_always_counts(open_bench: Open) -> None:
    """Of another size little is known, and what loads cost by themselves even less."""
    bench = open_bench()
    fetch = found(bench, bench.host)
    load = _load(bench, fetch, Order.FRONT, 0.1)
    for num_blocks, seconds in ((16, 0.0001), (1, 0.004), (1, 0.004)):
        bench.traffic.loading._note_speed(load, num_blocks, seconds, 1, has_room=True)

    assert bench.speeds.load_s("host", LAYOUT.block_bytes) == pytest.approx(0.004, rel=0.01)
    bench.traffic.matcher.give_up(fetch)


def test_every_load_from_elsewhere_says_how_fast_its_tier_is(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    fetch = found(bench, far)
    load = _load(bench, fetch, Order.FRONT, 0.1)
    for seconds in (0.1, 5.0, 5.0):
        bench.traffic.loading._note_speed(load, 16, seconds, 1, has_room=True)

    assert bench.speeds.load_s("far", 16 * LAYOUT.block_bytes) == pytest.approx(5.0)
    bench.traffic.matcher.give_up(fetch)


def test_what_lies_in_memory_may_take_as_long_as_the_device_computes_for_others(open_bench: Open) -> None:
    bench = open_bench()
    computes(bench.speeds, 0.1)
    fetch = found(bench, bench.host)
    for _ in range(5):
        bench.speeds.note_load("host", 16 * LAYOUT.block_bytes, 3.0)
    load = _load(bench, fetch, Order.FRONT, 1.0)
    bench.now[0] = 3.5

    assert bench.traffic.loading.plan(fetch, 0, 257) is None, "computing takes 1.6 s"
    assert bench.traffic.loading.is_late(load, 257)
    bench.traffic.loading.busy_s = 4.0
    assert bench.traffic.loading.plan(fetch, 0, 257) is not None
    assert not bench.traffic.loading.is_late(load, 257)
    bench.now[0] = 4.5
    assert bench.traffic.loading.is_late(load, 257)
    bench.traffic.matcher.give_up(fetch)


def test_what_is_not_in_memory_is_computed_if_that_is_faster_however_busy_the_device_is(open_bench: Open) -> None:
    """A disk is as busy as the device: all who come would wait for it."""
    far = FarTier()
    bench = open_bench(far)
    computes(bench.speeds, 0.1)
    fetch = found(bench, far)
    for _ in range(5):
        bench.speeds.note_load("far", 16 * LAYOUT.block_bytes, 30.0)
    load = _load(bench, fetch, Order.FRONT, 1.0)
    bench.traffic.loading.busy_s = 100.0
    bench.now[0] = 3.0

    assert bench.traffic.loading.plan(fetch, 0, 257) is None
    assert bench.traffic.loading.is_late(load, 257)
    bench.traffic.matcher.give_up(fetch)


def test_a_load_from_the_back_is_not_late_while_there_is_something_to_compute(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    computes(bench.speeds, 0.1)
    fetch = found(bench, far)
    load = _load(bench, fetch, Order.BACK, 1.0)
    load.take(4)
    bench.now[0] = 100.0

    assert not bench.traffic.loading.is_late(load, 257)
    load.claim(12)
    assert bench.traffic.loading.is_late(load, 257)
    load.end()
    assert not bench.traffic.loading.is_late(load, 257)
    bench.traffic.matcher.give_up(fetch)


def test_the_engines_share_is_such_that_both_sides_meet(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    computes(bench.speeds, 0.1)
    fetch = found(bench, far)
    load = _load(bench, fetch, Order.BACK, 16 * 0.3)

    assert bench.traffic.loading.share(load, 257) == pytest.approx(12, abs=1)
    load.take(3)
    load.claim(13)
    assert bench.traffic.loading.share(load, 257) == 0
    load.end()
    assert bench.traffic.loading.share(load, 257) == 3
    bench.traffic.matcher.give_up(fetch)


def test_an_abandoned_load_leaves_the_engine_something_to_do(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(far)
    computes(bench.speeds, 0.1)
    fetch = found(bench, far)
    load = _load(bench, fetch, Order.BACK, 0.01)
    load.take(1)
    load.claim(15)
    bench.now[0] = 10.0
    assert bench.traffic.loading.is_late(load, 257)
    load.abandon()

    assert bench.traffic.loading.share(load, 257) == 1
    bench.traffic.matcher.give_up(fetch)


# --- whole segments ----------------------------------------


class _SegmentedTier(FarTier):
    segment_blocks = 8

    @property
    def segmented(self) -> _SegmentedTier:
        return self

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        return [None for _ in names]


def test_segments_are_offered_where_host_memory_holds_two(open_bench: Open) -> None:
    tier = _SegmentedTier()
    assert open_bench(tier, num_blocks=16).traffic.segmented is tier
    assert open_bench(_SegmentedTier(), num_blocks=15).traffic.segmented is None
    assert open_bench(FarTier()).traffic.segmented is None


# --- the end ----------------------------------------


def test_close_ends_everything_and_a_second_one_nothing(open_bench: Open) -> None:
    bench = open_bench(FarTier())
    hashes = chain(1, 4)
    bench.traffic.storer.offer(hashes, bench.device.fill(range(4), hashes))
    bench.traffic.storer.send(is_last=True)

    bench.traffic.close()
    bench.traffic.close()

    assert bench.device.is_closed
    assert bench.device.stored == [[0, 1, 2, 3]]


def test_drain_waits_for_copies_and_forgets_what_is_held(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 4)
    bench.traffic.storer.offer(hashes, bench.device.fill(range(4), hashes))
    bench.traffic.storer.send(is_last=True)

    bench.traffic.drain()

    assert not bench.traffic.storer.has_stores
    assert bench.traffic.storer.take_copied() == []
