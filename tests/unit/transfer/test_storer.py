"""Blocks on their way from a device to real tiers: in the order they were sent, shown once copied, best effort."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierUnavailable
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Reservation
from kvtier.testing.faults import FailingTier, SlowTier, WrappedTier
from kvtier.testing.tier_contract import LAYOUT, chain, fetch_all, payloads
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.tier import Tier
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.step_marks import StepMarks
from kvtier.transfer.storer import Storer
from tests.support.host_device import WAIT_S, HostDevice
from tests.support.waiting import wait_until as until


@dataclass
class Bench:
    """A device, a host tier, perhaps tiers behind it, and what stores to them."""

    device: HostDevice
    host: HostTier
    storing: Storer
    hierarchy: Hierarchy
    woken: threading.Event

    def send(self, hashes: list[BlockHash], first_id: int = 0) -> DeviceLease:
        held = self.device.fill(range(first_id, first_id + len(hashes)), hashes)
        self.storing.offer(hashes, held)
        self.storing.send(is_last=True)
        return held

    def settle(self) -> None:
        assert self.storing.settle(WAIT_S)


Open = Callable[..., Bench]


@pytest.fixture
def open_bench() -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def make(num_blocks: int = 8, *, behind: tuple[Tier, ...] = ()) -> Bench:
            device = HostDevice()
            host = HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes)
            hierarchy = Hierarchy([host, *behind])
            stack.callback(hierarchy.close)
            woken = threading.Event()
            storing = Storer(hierarchy, device, StepMarks(device), woken.set)
            stack.callback(storing.close)
            stack.callback(device.gate.set)
            return Bench(device, host, storing, hierarchy, woken)

        yield make


def far_tier(num_blocks: int = 8) -> WrappedTier:
    return WrappedTier(HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes, "far"))


def test_what_was_sent_is_in_the_tier_byte_for_byte_and_its_blocks_come_back(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 4)

    held = bench.send(hashes, first_id=3)
    assert bench.storing.num_held == 4
    bench.settle()

    assert fetch_all(bench.host, hashes) == payloads(hashes)
    assert bench.storing.take_copied() == [held]
    assert bench.storing.num_held == 0
    assert bench.woken.is_set()


def test_an_offer_is_not_stored_before_it_is_sent(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    bench.storing.offer(hashes, bench.device.fill([0, 1], hashes))
    assert bench.storing.has_stores
    bench.settle()

    assert bench.device.stored == []
    assert bench.host.contains(hashes) == [False, False]
    bench.storing.send(is_last=True)
    bench.settle()
    assert bench.host.contains(hashes) == [True, True]
    bench.storing.take_copied()


def test_a_block_is_shown_and_comes_back_only_after_the_copy(open_bench: Open) -> None:
    bench = open_bench()
    bench.device.gate.clear()
    hashes = chain(1, 2)
    held = bench.send(hashes)
    until(lambda: bool(bench.device.stored))

    assert bench.host.contains(hashes) == [False, False]
    assert bench.host.match(hashes).ended is MatchEnd.PENDING
    assert bench.storing.take_copied() == []
    bench.device.gate.set()
    bench.settle()
    assert bench.host.contains(hashes) == [True, True]
    assert bench.storing.take_copied() == [held]


def test_blocks_are_stored_in_the_order_they_were_sent(open_bench: Open) -> None:
    bench = open_bench(16)
    for seed in range(4):
        bench.send(chain(seed, 2), first_id=2 * seed)
    bench.settle()

    assert bench.device.stored == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [held.ids for held in bench.storing.take_copied()] == bench.device.stored


def test_a_block_that_is_there_is_not_copied_again(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 3)
    bench.host.offer(hashes[:2], payloads(hashes[:2]))
    bench.send(hashes)
    bench.settle()

    assert bench.device.stored == [[2]]
    assert len(bench.storing.take_copied()) == 1


def test_one_hash_in_two_offers_of_a_batch_is_stored_once_and_both_come_back(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    for first in (0, 2):
        bench.storing.offer(hashes, bench.device.fill([first, first + 1], hashes))
    bench.storing.send(is_last=True)
    bench.settle()

    assert fetch_all(bench.host, hashes) == payloads(hashes)
    assert len(bench.storing.take_copied()) == 2
    assert bench.host.num_free_blocks == bench.host.num_blocks - 2


# --- announcements ----------------------------------------


def test_what_is_announced_is_pending_until_it_is_stored(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 3)
    bench.storing.announce("owner", hashes)
    bench.settle()
    assert bench.host.match(hashes).ended is MatchEnd.PENDING

    bench.send(hashes[:2])
    bench.settle()

    with bench.host.match(hashes) as lease:
        assert (lease.num_blocks, lease.ended) == (2, MatchEnd.PENDING)
    bench.storing.withdraw("owner")
    bench.settle()
    with bench.host.match(hashes) as lease:
        assert (lease.num_blocks, lease.ended) == (2, MatchEnd.NEVER_STORED)
    assert bench.host.num_free_blocks == bench.host.num_blocks - 2
    bench.storing.take_copied()


def test_a_withdrawal_of_nothing_does_nothing(open_bench: Open) -> None:
    bench = open_bench()
    bench.storing.announce("owner", [])
    bench.storing.withdraw("owner")
    bench.storing.withdraw("nobody")
    bench.settle()


def test_what_another_has_announced_is_stored_in_its_place(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    bench.storing.announce("slow", hashes)
    bench.storing.announce("fast", hashes)
    bench.send(hashes)
    bench.storing.withdraw("fast")
    bench.storing.withdraw("slow")
    bench.settle()

    assert fetch_all(bench.host, hashes) == payloads(hashes)
    assert bench.host.num_free_blocks == bench.host.num_blocks - 2
    bench.storing.take_copied()


def test_a_withdrawal_leaves_the_places_that_a_later_owner_made(open_bench: Open) -> None:
    bench = open_bench()
    hashes = chain(1, 2)
    bench.storing.announce("first", hashes)
    bench.send(hashes)
    bench.settle()
    bench.host.drop(hashes)
    bench.storing.announce("second", hashes)
    bench.storing.withdraw("first")
    bench.settle()

    assert bench.host.match(hashes).ended is MatchEnd.PENDING
    bench.storing.withdraw("second")
    bench.settle()
    assert bench.host.match(hashes).ended is MatchEnd.NEVER_STORED
    bench.storing.take_copied()


def test_announcements_that_are_never_kept_end_with_the_engine(open_bench: Open) -> None:
    bench = open_bench()
    bench.storing.announce("owner", chain(1, 3))
    bench.storing.close()

    assert bench.host.num_free_blocks == bench.host.num_blocks


# --- cancelling ----------------------------------------


def test_what_waits_is_cancelled_and_what_is_being_copied_is_not(open_bench: Open) -> None:
    bench = open_bench()
    bench.device.gate.clear()
    copying = bench.send(chain(1, 2))
    until(lambda: bool(bench.device.stored))
    waiting = bench.send(chain(2, 2), first_id=2)

    bench.storing.hurry()
    bench.storing.hurry()

    assert bench.storing.take_copied() == [waiting]
    assert bench.storing.num_held == 2
    bench.device.gate.set()
    bench.settle()
    assert bench.storing.take_copied() == [copying]
    assert bench.host.contains(chain(1, 2) + chain(2, 2)) == [True, True, False, False]
    assert bench.device.stored == [[0, 1]]
    assert bench.host.num_free_blocks == bench.host.num_blocks - 2


# --- tiers that are full or fail ----------------------------------------


def test_what_a_full_tier_refuses_is_counted_and_its_blocks_come_back(open_bench: Open) -> None:
    bench = open_bench(2)
    kept = chain(9, 2)
    bench.host.offer(kept, payloads(kept))
    with bench.host.match(kept):
        held = bench.send(chain(1, 2))
        bench.settle()

    assert bench.storing.take_copied() == [held]
    assert bench.hierarchy.metrics.value(bench.hierarchy.metrics.refused_blocks, tier="host") == 2
    bench.send(chain(2, 2))
    bench.settle()
    assert bench.host.contains(chain(2, 2)) == [True, True]
    bench.storing.take_copied()


def test_a_device_that_fails_to_copy_costs_the_store_and_nothing_else(open_bench: Open) -> None:
    bench = open_bench()
    bench.device.error = TierUnavailable("injected")
    held = bench.send(chain(1, 2))
    bench.settle()

    assert bench.storing.take_copied() == [held]
    assert bench.host.contains(chain(1, 2)) == [False, False]
    assert bench.host.num_free_blocks == bench.host.num_blocks


def test_a_copy_that_fails_while_it_runs_leaves_nothing_pending(open_bench: Open) -> None:
    bench = open_bench()
    bench.device.late_error = TierUnavailable("injected")
    held = bench.send(chain(1, 2))
    bench.settle()

    assert bench.storing.take_copied() == [held]
    assert bench.host.match(chain(1, 2)).ended is MatchEnd.NEVER_STORED, "others wait for what nobody writes"
    assert bench.host.num_free_blocks == bench.host.num_blocks


def test_an_unexpected_error_gives_the_blocks_back_and_the_next_store_works(
    open_bench: Open, caplog: pytest.LogCaptureFixture
) -> None:
    bench = open_bench()
    bench.device.error = ValueError("a mistake of ours")
    held = bench.send(chain(1, 2))
    bench.settle()
    assert "storing blocks failed" in caplog.text
    assert bench.storing.take_copied() == [held]

    bench.device.error = None
    bench.send(chain(1, 2))
    bench.settle()

    assert fetch_all(bench.host, chain(1, 2)) == payloads(chain(1, 2))
    bench.storing.take_copied()


def test_what_is_stored_is_pushed_to_tiers_out_of_reach(open_bench: Open) -> None:
    far = far_tier()
    bench = open_bench(behind=(far,))
    hashes = chain(1, 4)
    bench.send(hashes)
    bench.settle()

    assert fetch_all(far, hashes) == payloads(hashes)
    bench.storing.take_copied()


def test_a_failing_tier_out_of_reach_loses_what_it_was_offered(open_bench: Open) -> None:
    far = FailingTier(far_tier())
    bench = open_bench(behind=(far,))
    held = bench.send(chain(1, 2))
    bench.settle()

    assert bench.storing.take_copied() == [held]
    assert bench.host.contains(chain(1, 2)) == [True, True]
    assert far.inner.contains(chain(1, 2)) == [False, False]


def test_a_slow_tier_out_of_reach_does_not_hold_the_devices_blocks(open_bench: Open) -> None:
    started, goes_on = threading.Event(), threading.Event()

    def sleep(delay_s: float) -> None:
        started.set()
        assert goes_on.wait(WAIT_S)

    bench = open_bench(behind=(SlowTier(far_tier(), 1.0, sleep),))
    held = bench.send(chain(1, 2))
    assert started.wait(WAIT_S)

    assert bench.storing.take_copied() == [held]
    assert not bench.storing.settle(0.05)
    goes_on.set()
    bench.settle()


class AnnouncingTier(WrappedTier):
    """A tier out of reach that keeps what it was told, in order."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.told: list[tuple[str, list[BlockHash]]] = []

    def announce(self, hashes: Sequence[BlockHash]) -> None:
        self.told.append(("announced", list(hashes)))

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        self.told.append(("withdrawn", list(hashes)))

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        self.told.append(("offered", list(hashes)))
        return super().offer(hashes, blocks)


def test_a_tier_out_of_reach_hears_what_is_computed_then_gets_it_then_that_no_more_comes(open_bench: Open) -> None:
    far = AnnouncingTier(far_tier())
    bench = open_bench(behind=(far,))
    hashes, owner = chain(1, 4), object()
    bench.storing.announce(owner, hashes)
    bench.storing.offer(hashes[:2], bench.device.fill([0, 1], hashes[:2]), owner)
    bench.storing.withdraw(owner)
    bench.storing.send(is_last=True)
    bench.settle()

    assert far.told == [("announced", hashes), ("offered", hashes[:2]), ("withdrawn", hashes)]
    bench.storing.withdraw(owner)
    bench.settle()
    assert len(far.told) == 3
    bench.storing.take_copied()


# --- whole segments ----------------------------------------


class SegmentedTier(WrappedTier):
    """A tier out of reach that says it keeps whole segments."""

    segment_blocks = 4

    @property
    def segmented(self) -> SegmentedTier:
        return self

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        return [None for _ in names]


def segmented_tier() -> SegmentedTier:
    return SegmentedTier(HostTier(LAYOUT, 32 * LAYOUT.slot_bytes, "segments"))


def refused(bench: Bench, tier: str) -> float:
    return bench.hierarchy.metrics.value(bench.hierarchy.metrics.refused_blocks, tier=tier)


@pytest.mark.parametrize("num_in_host", [0, 2, 4])
def test_a_found_segment_reaches_the_tier_that_keeps_segments_and_no_other(open_bench: Open, num_in_host: int) -> None:
    far, segments = far_tier(), segmented_tier()
    bench = open_bench(behind=(far, segments))
    hashes = chain(1, 4)
    bench.host.offer(hashes[:num_in_host], payloads(hashes[:num_in_host]))

    held = bench.device.fill(range(4), hashes)
    bench.storing.offer_segment(hashes, held)
    bench.storing.send(is_last=True)
    bench.settle()

    assert fetch_all(segments, hashes) == payloads(hashes)
    assert far.contains(hashes) == [False] * 4
    assert bench.device.stored == ([list(range(num_in_host, 4))] if num_in_host < 4 else []), "what the host lacked"
    assert bench.storing.take_copied() == [held]
    assert not bench.storing.has_stores


def test_a_found_segment_is_not_stored_in_other_tiers_of_this_host(open_bench: Open) -> None:
    local = HostTier(LAYOUT, 8 * LAYOUT.slot_bytes, "local")
    segments = segmented_tier()
    bench = open_bench(behind=(_LocalTier(local), segments))
    hashes = chain(1, 4)
    bench.storing.offer_segment(hashes, bench.device.fill(range(4), hashes))
    bench.send(chain(2, 2), first_id=4)
    bench.settle()

    assert local.contains(hashes + chain(2, 2)) == [False] * 4 + [True] * 2
    assert fetch_all(segments, hashes) == payloads(hashes)
    bench.storing.take_copied()


def test_a_segment_that_leaves_host_memory_before_it_is_pushed_is_refused_whole(open_bench: Open) -> None:
    started, goes_on = threading.Event(), threading.Event()

    class Slow(SegmentedTier):
        def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
            started.set()
            assert goes_on.wait(WAIT_S)
            return super().offer(hashes, blocks)

    segments = Slow(HostTier(LAYOUT, 32 * LAYOUT.slot_bytes, "segments"))
    bench = open_bench(8, behind=(segments,))
    bench.send(chain(9, 1))
    assert started.wait(WAIT_S)
    hashes = chain(1, 4)
    bench.storing.offer_segment(hashes, bench.device.fill(range(1, 5), hashes))
    bench.storing.send(is_last=True)
    until(lambda: bench.host.contains(hashes) == [True] * 4)
    bench.host.drop(hashes[2:3])  # as an eviction would
    goes_on.set()
    bench.settle()

    assert refused(bench, "segments") == 4
    assert segments.contains(hashes) == [False] * 4
    assert len(bench.storing.take_copied()) == 2
    assert not bench.storing.has_stores


def test_a_segment_that_waits_when_blocks_are_needed_is_counted_where_it_was_to_go(open_bench: Open) -> None:
    bench = open_bench(behind=(segmented_tier(),))
    bench.device.gate.clear()
    bench.send(chain(9, 2))
    until(lambda: bool(bench.device.stored))
    hashes = chain(1, 4)
    held = bench.device.fill(range(2, 6), hashes)
    bench.storing.offer_segment(hashes, held)

    bench.storing.hurry()

    assert bench.storing.take_copied() == [held]
    assert (refused(bench, "segments"), refused(bench, "host")) == (4, 0)
    bench.device.gate.set()
    bench.settle()
    assert bench.host.contains(hashes) == [False] * 4
    bench.storing.take_copied()


class _LocalTier(WrappedTier):
    """As a cache server on this host: a device can write its slots, and nothing passes through its memory."""

    @property
    def is_local(self) -> bool:
        return True

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        return self.inner.reserve(hashes)


def test_close_finishes_what_was_sent(open_bench: Open) -> None:
    far = far_tier(16)
    bench = open_bench(16, behind=(far,))
    for seed in range(4):
        bench.send(chain(seed, 2), first_id=2 * seed)
    bench.storing.close()

    for seed in range(4):
        assert far.contains(chain(seed, 2)) == [True, True]
