"""Every verdict of a `Prefetch`, with real tiers and a device of plain memory: no engine, no model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease
from kvtier.testing.faults import TruncatingTier
from kvtier.testing.tier_contract import LAYOUT, chain, fetch_all, payload, payloads
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.load import LoadPlan, Order
from kvtier.transfer.prefetch import Prefetch
from kvtier.transfer.prefetch_state import READY, WAIT, PrefetchState
from kvtier.transfer.transfer import NoTransfer, Transfer
from tests.support.host_device import WAIT_S, HostDevice
from tests.support.traffic_bench import Bench, FarTier, Open, computes, loads
from tests.support.waiting import wait_until as until

SIZE = LAYOUT.block_tokens
NUM_BLOCKS = 16
"""What the device has."""


class Prompt:
    """A `PromptBlocks` whose blocks on the device are those of the same numbers. Its last token is not cached."""

    block_tokens = SIZE

    def __init__(self, device: HostDevice, hashes: list[BlockHash]) -> None:
        self._device = device
        self._all = hashes
        self._end: int | None = None
        self.hashes: list[BlockHash] = []
        self.ids: list[int] = []
        self.num_tokens = len(hashes) * SIZE + 1
        self.num_computed = 0
        self.room = NUM_BLOCKS
        self.num_shown = 0
        self.num_unclaimed = 0
        self.is_blocked = False
        """Another prompt computes its next block."""

    @property
    def num_filled(self) -> int:
        return self.num_computed

    @property
    def num_wanted(self) -> int:
        return len(self._all)

    def hash_up_to(self, end: int | None) -> None:
        self._end = end

    def extend_hashes(self) -> None:
        self.hashes = self._all[: self._end]

    def num_on_device(self) -> int:
        self.extend_hashes()
        return 0

    def extend(self) -> bool:
        return not self.is_blocked

    def grow(self, num_blocks: int) -> bool:
        if num_blocks > self.room:
            return False
        self.ids += range(len(self.ids), num_blocks)
        return True

    def fill(self, num_blocks: int) -> None:
        self.num_computed = num_blocks * SIZE

    def show(self) -> None:
        self.num_shown = self.num_computed // SIZE

    def unclaim(self) -> None:
        self.num_unclaimed += 1

    def lease(self, first: int, end: int) -> DeviceLease:
        return DeviceLease(self.ids[first:end], [])

    def compute(self, num_tokens: int) -> None:
        """As a step does: what is computed is right."""
        first, self.num_computed = self.num_computed // SIZE, self.num_computed + num_tokens
        end = self.num_computed // SIZE
        self._device.fill(self.ids[first:end], self._all[first:end])

    def holds(self, num_blocks: int) -> bool:
        return all(self._device.block(number) == payload(self._all[number]) for number in range(num_blocks))


class Way:
    """One prompt over the tiers of a bench."""

    def __init__(self, bench: Bench, hashes: list[BlockHash], piece_blocks: int = 64) -> None:
        self.bench = bench
        self.transfer = Transfer(bench.traffic, NUM_BLOCKS, lambda: bench.now[0], piece_blocks)
        self.prompt = Prompt(bench.device, hashes)
        self.prefetch = self.transfer.begin(self.prompt)

    def poll(self, *, is_idle: bool = True) -> list[DeviceLease]:
        return self.transfer.poll([self.prefetch], is_idle=is_idle, taken_in_s=0.0)

    def ask(self) -> None:
        """The tiers have answered for all of the prompt."""
        self.poll()
        while self.prefetch.state is PrefetchState.UNASKED or self.prefetch.is_looking:
            until(lambda: not self.prefetch.is_matching)
            self.poll()

    def begin(self) -> LoadPlan:
        plan = self.prefetch.admission()
        assert isinstance(plan, LoadPlan)
        assert self.prefetch.grow(plan, is_alone=True)
        self.prefetch.admit()
        return plan

    def end(self) -> None:
        """Nothing is held any more."""
        self.prefetch.leave()
        until(self.bench.is_free)


def test_a_prompt_is_not_computed_before_the_tiers_were_asked(open_bench: Open) -> None:
    way = Way(open_bench(), chain(1, 4))

    assert way.prefetch.state is PrefetchState.UNASKED
    way.ask()
    assert way.prefetch.state is PrefetchState.MATCHING
    way.end()


def test_a_prompt_that_no_tier_has_is_ready_at_once_and_says_why(open_bench: Open) -> None:
    way = Way(open_bench(), chain(1, 4))
    way.ask()

    assert way.prefetch.admission() is READY
    way.prefetch.finish()
    assert way.prefetch.state is PrefetchState.FINISHED
    assert way.prefetch.ending is not None
    assert (way.prefetch.ending.position, way.prefetch.ending.reason) == (0, MatchEnd.NEVER_STORED)
    assert way.prefetch.advance(64, is_alone=True) is READY
    way.end()


def test_what_is_found_comes_from_the_front_and_then_the_rest_is_ready(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 6)
    bench.host.offer(hashes[:4], payloads(hashes[:4]))
    bench.device.gate.clear()
    way = Way(bench, hashes)
    way.ask()
    plan = way.begin()
    assert (plan.first, plan.end, plan.order) == (0, 4, Order.FRONT)

    assert way.prefetch.begin(plan, 64) is WAIT
    assert way.prefetch.state is PrefetchState.LOADING
    assert way.prefetch.advance(64, is_alone=True) is WAIT
    bench.device.gate.set()
    until(lambda: way.prefetch.load is not None and way.prefetch.load.is_over)
    assert way.prefetch.advance(64, is_alone=True) is READY

    assert way.prefetch.state is PrefetchState.FINISHED
    assert way.prompt.holds(4)
    assert way.prompt.num_shown == 4
    assert way.prefetch.history.loaded_tokens == {"host": 4 * SIZE}
    assert way.prefetch.ending is not None
    assert (way.prefetch.ending.position, way.prefetch.ending.reason) == (4, MatchEnd.NEVER_STORED)
    way.end()


def test_while_another_prompt_computes_the_next_block_a_running_prompt_waits(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 4)
    bench.host.offer(hashes, payloads(hashes))
    way = Way(bench, hashes)
    way.ask()
    way.prompt.is_blocked = True
    assert way.prefetch.advance(64, is_alone=True) is WAIT
    way.prompt.is_blocked = False
    assert way.prefetch.advance(64, is_alone=True) is WAIT
    assert way.prefetch.state is PrefetchState.LOADING
    way.end()


def test_without_room_for_a_load_a_running_prompt_is_computed(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 4)
    bench.host.offer(hashes, payloads(hashes))
    way = Way(bench, hashes)
    way.ask()
    way.prompt.room = 2
    assert way.prefetch.advance(64, is_alone=True) is READY
    assert way.prefetch.state is PrefetchState.FINISHED
    way.end()


def _growing(open_bench: Open) -> Way:
    """A prompt of eight blocks, found as a whole, beside others that compute: it takes four blocks at a time."""
    far, hashes = FarTier(), chain(1, 8)
    bench = open_bench(far, always_loads=True)
    far.offer(hashes, payloads(hashes))
    way = Way(bench, hashes, piece_blocks=1)
    way.ask()
    way.poll(is_idle=False)
    return way


def test_beside_others_a_prompt_takes_its_blocks_a_few_at_a_time(open_bench: Open) -> None:
    way = _growing(open_bench)
    plan = way.prefetch.plan()
    assert plan is not None
    verdicts = []
    while way.prefetch.load is None:
        verdicts.append(way.prefetch.advance(64, is_alone=False))
        assert len(way.prompt.ids) <= 4 * len(verdicts)

    assert verdicts == [WAIT, WAIT]
    assert way.transfer.has_unmatched
    way.end()


def _meeting(open_bench: Open) -> Way:
    """A prompt whose blocks come from a slow tier, from the back, while its front is computed."""
    far, hashes = FarTier(), chain(1, 12)
    bench = open_bench(far)
    far.offer(hashes, payloads(hashes))
    computes(bench.speeds, 1.0)
    loads(bench.speeds, "far", 0.9)
    bench.device.gate.clear()
    way = Way(bench, hashes)
    way.ask()
    return way


def test_while_blocks_come_from_the_back_the_front_is_computed_until_both_meet(open_bench: Open) -> None:
    way = _meeting(open_bench)
    plan = way.begin()
    assert plan.order is Order.BACK

    verdict = way.prefetch.begin(plan, 1024)
    assert way.prefetch.state is PrefetchState.MEETING
    num_computed = 0
    for _ in range(1000):
        if verdict is READY:
            break
        if verdict.may_compute:
            assert verdict.num_tokens is not None
            assert verdict.num_tokens > 0
            way.prompt.compute(verdict.num_tokens)
            num_computed += verdict.num_tokens
        way.bench.device.gate.set()
        load = way.prefetch.load
        until(lambda load=load: load is None or load.is_over)  # type: ignore[misc]
        verdict = way.prefetch.advance(1024, is_alone=True)

    assert verdict is READY
    assert way.prefetch.state is PrefetchState.FINISHED
    assert way.prompt.holds(12)
    assert num_computed + way.prefetch.history.loaded_tokens["far"] == 12 * SIZE
    way.end()


class _StuckTier(FarTier):
    """Its blocks do not come before `may_come` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_come = threading.Event()

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        lease = super().match(hashes, timeout_s=timeout_s)
        fetch = lease.fetch

        def fetch_later(into: Sequence[Buffer], first: int = 0) -> int:
            assert self.may_come.wait(WAIT_S)
            return fetch(into, first)

        lease.fetch = fetch_later  # type: ignore[method-assign]
        return lease


def test_what_is_late_is_abandoned_and_computed(open_bench: Open) -> None:
    far, hashes = _StuckTier(), chain(1, 4)
    bench = open_bench(far)
    far.offer(hashes, payloads(hashes))
    computes(bench.speeds, 1.0)
    loads(bench.speeds, "far", 0.01)
    way = Way(bench, hashes)
    way.ask()
    way.prefetch.begin(way.begin(), 64)
    assert way.prefetch.advance(64, is_alone=True) is WAIT
    load = way.prefetch.load
    assert load is not None
    until(lambda: load.times.picked_at is not None)
    bench.now[0] = 1000.0

    assert way.prefetch.advance(64, is_alone=True) is READY
    assert load.is_abandoned
    assert way.prefetch.state is PrefetchState.FINISHED
    assert way.prefetch.ending is not None
    assert way.prefetch.ending.reason is MatchEnd.SLOWER
    far.may_come.set()
    until(lambda: load.is_over)
    assert not way.prompt.holds(1), "nothing is written any more"
    way.end()


def test_a_tier_that_loses_blocks_on_the_way_leaves_the_rest_to_be_computed(open_bench: Open) -> None:
    far, hashes = TruncatingTier(FarTier(), 3), chain(1, 6)
    bench = open_bench(far, always_loads=True)
    far.offer(hashes, payloads(hashes))
    way = Way(bench, hashes)
    way.ask()
    way.prefetch.begin(way.begin(), 64)
    until(lambda: way.prefetch.load is not None and way.prefetch.load.is_over)

    assert way.prefetch.advance(64, is_alone=True) is READY
    assert way.prefetch.state is PrefetchState.FINISHED
    assert way.prompt.num_computed < 6 * SIZE
    assert way.prompt.holds(way.prompt.num_computed // SIZE)
    assert way.prompt.num_unclaimed
    assert way.prefetch.ending is not None
    assert way.prefetch.ending.reason is MatchEnd.LOST
    way.end()


def test_everything_with_the_device_is_ready_early_and_the_step_waits_for_it(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 4)
    bench.host.offer(hashes, payloads(hashes))
    bench.device.gate.clear()
    way = Way(bench, hashes)
    way.ask()
    way.prefetch.begin(way.begin(), 64)
    load = way.prefetch.load
    assert load is not None
    until(lambda: load.is_submitted)

    assert way.prefetch.start_early(is_alone=True)
    assert way.prefetch.state is PrefetchState.FINISHED
    arrivals = way.transfer.take_arrivals()
    assert len(arrivals) == 1
    assert not arrivals[0].is_done
    bench.device.gate.set()
    until(lambda: load.is_over)
    assert way.prompt.holds(4)
    way.end()


def test_a_prompt_that_leaves_gives_everything_back_and_may_be_asked_for_again(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 4)
    bench.host.offer(hashes, payloads(hashes))
    bench.device.gate.clear()
    way = Way(bench, hashes)
    way.ask()
    way.prefetch.begin(way.begin(), 64)
    way.prefetch.leave()
    assert way.prefetch.state is PrefetchState.UNASKED
    bench.device.gate.set()
    until(bench.is_free)
    bench.host.offer(hashes, payloads(hashes))

    way.prompt.ids = []
    way.ask()
    way.prefetch.begin(way.begin(), 64)
    until(lambda: way.prefetch.load is not None and way.prefetch.load.is_over)
    assert way.prefetch.advance(64, is_alone=True) is READY
    assert way.prompt.holds(4)
    assert way.prefetch.history.loaded_tokens == {}, "counted for the first time only"
    way.end()


def test_what_a_step_has_filled_is_stored_and_its_blocks_come_back(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 4)
    way = Way(bench, hashes)
    way.ask()
    assert way.prefetch.admission() is READY
    way.prefetch.finish()
    way.prompt.grow(4)
    way.prefetch.admit()
    way.prompt.compute(3 * SIZE)
    way.prefetch.filled()
    assert way.transfer.has_stores
    way.transfer.send(is_last=True)
    assert way.transfer.settle()

    assert fetch_all(bench.host, hashes[:3]) == payloads(hashes[:3])
    assert [lease.ids for lease in way.poll()] == [[0, 1, 2]]
    assert not way.transfer.has_stores
    way.prefetch.leave()


def test_room_is_kept_for_what_admitted_prompts_still_load(open_bench: Open) -> None:
    way = _growing(open_bench)
    assert way.prefetch.advance(64, is_alone=False) is WAIT
    missing = 8 - len(way.prompt.ids)
    assert missing > 0
    other = way.transfer.begin(Prompt(way.bench.device, chain(2, 4)))

    assert other.has_room(4, 4 + missing)
    assert not other.has_room(4, 3 + missing)
    way.end()


def test_after_a_failure_everything_is_forgotten(open_bench: Open) -> None:
    bench, hashes = open_bench(), chain(1, 4)
    bench.host.offer(hashes, payloads(hashes))
    way = Way(bench, hashes)
    way.ask()
    way.prefetch.begin(way.begin(), 64)
    way.prefetch.leave()
    way.transfer.start_over()

    assert not way.transfer.has_unmatched
    assert not way.transfer.has_stores
    assert way.transfer.begin(Prompt(bench.device, hashes)).has_room(NUM_BLOCKS, NUM_BLOCKS)
    until(bench.is_free)


def test_without_tiers_every_prompt_is_ready(open_bench: Open) -> None:
    transfer = NoTransfer()
    prompt = Prompt(HostDevice(), chain(1, 4))
    prefetch: Prefetch = transfer.begin(prompt)

    assert transfer.poll([prefetch], is_idle=True, taken_in_s=0.0) == []
    assert prefetch.state is PrefetchState.FINISHED
    assert prefetch.admission() is READY
    assert prefetch.advance(64, is_alone=True) is READY
    assert prefetch.has_room(1000, 0)
    prefetch.admit()
    prefetch.announce()
    prefetch.finish()
    prefetch.filled()
    prefetch.leave()
    transfer.send(is_last=True)
    assert prefetch.state is PrefetchState.FINISHED
    assert not transfer.has_stores
    assert not transfer.may_wait_for_room()
    assert transfer.settle()
    transfer.close()
