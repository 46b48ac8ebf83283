"""Prompts looked up in a real tier, for an engine that asks once: found, held, given back. Without an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.testing.faults import WrappedTier
from kvtier.testing.tier_contract import LAYOUT, payloads
from kvtier.tiers.host import HostTier
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.lookup import Described, Lookup, Lookups, hashed_gently
from tests.support.traffic_bench import computes, loads, until

_ROOT = Namespace(bytes(32))
_CHUNK_TOKENS = 1024
_TIMEOUT_S = 10.0


class _Tier(WrappedTier):
    """Answers while `is_open`. Of its leases no more than `most_held` may be open."""

    def __init__(self) -> None:
        super().__init__(HostTier(LAYOUT, 32 * LAYOUT.slot_bytes, "server"))
        self.is_open = threading.Event()
        self.is_open.set()
        self.most_held = 100
        self.cuts_at: int | None = None
        self.num_waiting = 0
        self.asked_blocks: list[int] = []
        self.leases: list[Any] = []

    @property
    def num_held(self) -> int:
        return sum(not vars(lease)["_is_over"] for lease in self.leases)

    def match_lazily(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self.num_waiting += 1
        assert self.is_open.wait(10)
        self.asked_blocks.append(len(hashes))
        if self.num_held >= self.most_held:
            return EmptyLease(MatchEnd.LIMIT)
        lease = self.match(hashes[: self.cuts_at])
        if self.cuts_at is not None:
            vars(lease)["ended"] = MatchEnd.LIMIT
        if lease.num_blocks:
            self.leases.append(lease)
        return lease


@dataclass
class Bench:
    tier: _Tier
    lookups: Lookups
    speeds: Speeds
    num_tokens: dict[Lookup, int] = field(default_factory=dict)

    def lookup(self, seed: int, num_blocks: int, *, num_stored: int = 0) -> Lookup:
        """Of a prompt with one token more than whole blocks, the first `num_stored` of which are in the tier."""
        tokens = [seed * 1000 + number for number in range(num_blocks * LAYOUT.block_tokens + 1)]
        hashes = block_hashes(_ROOT, tokens, LAYOUT.block_tokens)
        if num_stored:
            self.tier.offer(hashes[:num_stored], payloads(hashes[:num_stored]))
        return self.prompt(tokens)

    def prompt(self, tokens: list[int]) -> Lookup:
        lookup = Lookup(lambda: Described(_ROOT, block_hashes(_ROOT, tokens, LAYOUT.block_tokens)))
        self.num_tokens[lookup] = len(tokens)
        return lookup

    def begin(self, lookup: Lookup, first: int = 0) -> None:
        self.lookups.begin(lookup, self.num_tokens[lookup], first)

    def found(self, lookup: Lookup, first: int = 0, asked_from: int = 0) -> int:
        self.begin(lookup, asked_from)
        return self.answer(lookup, first)

    def answer(self, lookup: Lookup, first: int = 0) -> int:
        until(lambda: self.lookups.take(lookup, first))
        return lookup.found_end


@pytest.fixture
def bench() -> Iterator[Bench]:
    tier, speeds = _Tier(), Speeds()
    decision = LoadOrCompute(speeds, LAYOUT, _CHUNK_TOKENS, always_loads=False, clock=lambda: 0.0)
    with ThreadPoolExecutor(2) as threads:
        lookups = Lookups(tier, decision, threads, timeout_s=_TIMEOUT_S)
        yield Bench(tier, lookups, speeds)
        tier.is_open.set()
        lookups.close()
    assert tier.num_held == 0
    tier.close()


def test_what_the_tier_has_is_found_and_held_until_it_is_released(bench: Bench) -> None:
    lookup = bench.lookup(1, 6, num_stored=4)

    assert bench.found(lookup) == 4
    assert (lookup.end, len(lookup.hashes), lookup.root) == (4, 6, _ROOT)
    assert bench.tier.num_held == 1

    bench.lookups.release(lookup)
    until(lambda: bench.tier.num_held == 0)
    assert lookup.is_idle


def test_there_is_no_answer_before_the_tier_has_one(bench: Bench) -> None:
    lookup = bench.lookup(1, 6, num_stored=4)
    bench.tier.is_open.clear()
    bench.begin(lookup)

    assert not bench.lookups.take(lookup, 0)
    assert not lookup.is_idle
    bench.tier.is_open.set()
    assert bench.answer(lookup) == 4


@pytest.mark.parametrize(("num_stored", "found_end", "stored_end"), [(3, 2, 3), (2, 2, 2), (1, 1, 1), (0, 0, 0)])
def test_the_block_of_the_last_token_is_not_loaded_but_known_to_be_stored(
    bench: Bench, num_stored: int, found_end: int, stored_end: int
) -> None:
    tokens = list(range(3 * LAYOUT.block_tokens))
    hashes = block_hashes(_ROOT, tokens, LAYOUT.block_tokens)
    bench.tier.offer(hashes[:num_stored], payloads(hashes[:num_stored]))
    lookup = bench.prompt(tokens)

    assert bench.found(lookup) == found_end

    assert bench.tier.asked_blocks == [3]
    assert (lookup.end, lookup.stored_end, len(lookup.hashes)) == (found_end, stored_end, 3)
    assert (lookup.ended is MatchEnd.ALL) == (num_stored >= 2)


def test_a_lookup_that_begins_again_knows_nothing_of_what_is_stored(bench: Bench) -> None:
    lookup = bench.lookup(1, 6, num_stored=4)
    bench.found(lookup)
    assert lookup.stored_end == 4
    bench.tier.is_open.clear()

    bench.lookups.begin_again(lookup, bench.num_tokens[lookup], 1)

    assert lookup.stored_end == 1
    bench.tier.is_open.set()
    assert bench.answer(lookup) == 4


def test_a_long_prompt_is_hashed_in_pieces_as_in_one() -> None:
    tokens = list(range(1300 * LAYOUT.block_tokens + 1))
    expected = block_hashes(_ROOT, tokens, LAYOUT.block_tokens)

    assert hashed_gently(_ROOT, tokens, LAYOUT.block_tokens) == expected
    rest = hashed_gently(_ROOT, tokens[700 * LAYOUT.block_tokens :], LAYOUT.block_tokens, expected[699])
    assert rest == expected[700:]


def test_only_what_the_engine_lacks_is_asked_for(bench: Bench) -> None:
    lookup = bench.lookup(1, 6, num_stored=4)

    assert bench.found(lookup, first=3, asked_from=3) == 4

    assert bench.tier.asked_blocks == [3]
    assert lookup.end == 4
    leased = lookup.leased(3, 4)
    assert leased is not None
    assert (leased.inode, leased.offsets) == (lookup.lease.arena.inode, list(lookup.lease.offsets))
    assert lookup.leased(3, 5) is None


def test_a_lookup_that_begins_again_gives_back_what_it_held_and_what_it_still_finds(bench: Bench) -> None:
    lookup = bench.lookup(1, 6, num_stored=4)
    bench.found(lookup, asked_from=3)
    bench.tier.is_open.clear()
    bench.lookups.begin_again(lookup, bench.num_tokens[lookup], 2)
    bench.lookups.begin_again(lookup, bench.num_tokens[lookup], 0)
    bench.tier.is_open.set()

    assert bench.answer(lookup) == 4
    until(lambda: bench.tier.num_held == 1)
    assert lookup.leased(0, 4) is not None


def test_a_lookup_that_waits_for_its_turn_can_be_cancelled(bench: Bench) -> None:
    bench.tier.is_open.clear()
    busy = [bench.lookup(seed, 4) for seed in (1, 2)]
    cancelled = bench.lookup(3, 4)
    for lookup in (*busy, cancelled):
        bench.begin(lookup)
    until(lambda: bench.tier.num_waiting == 2)

    for lookup in (*busy, cancelled):
        bench.lookups.cancel(lookup)
    bench.tier.is_open.set()

    assert [bench.answer(lookup) for lookup in busy] == [0, 0]
    assert cancelled.is_idle
    assert len(bench.tier.asked_blocks) == 2


def test_a_prompt_that_cannot_be_told_from_others_is_not_looked_for(bench: Bench) -> None:
    def fail() -> Described:
        raise OSError("no such adapter")

    lookup = bench.prompt(list(range(100)))
    lookup.describe = fail

    assert bench.found(lookup) == 0
    assert not lookup.is_cachable
    assert bench.tier.asked_blocks == []


def test_the_load_ends_at_once_where_computing_is_faster(bench: Bench) -> None:
    computes(bench.speeds, 0.001)
    loads(bench.speeds, "server", 0.1)
    lookup = bench.lookup(1, 6, num_stored=4)

    assert bench.found(lookup, first=1) == 4
    assert lookup.end == 1


def test_a_prompt_that_was_given_up_is_not_matched_and_holds_nothing(bench: Bench) -> None:
    bench.tier.is_open.clear()
    first = [bench.lookup(seed, 4, num_stored=4) for seed in (1, 2)]
    late = bench.lookup(3, 4, num_stored=4)
    for lookup in (*first, late):
        bench.begin(lookup)
    until(lambda: bench.tier.num_waiting == 2)

    for lookup in (*first, late):
        bench.lookups.forget(lookup)
    bench.tier.is_open.set()

    assert bench.found(bench.lookup(4, 5)) == 0
    until(lambda: bench.tier.num_held == 0)
    assert sorted(bench.tier.asked_blocks) == [4, 4, 5]


def test_a_prompt_beyond_the_limit_waits_while_others_load(bench: Bench) -> None:
    bench.tier.most_held = 1
    holder, waiting = bench.lookup(1, 4, num_stored=4), bench.lookup(2, 4, num_stored=4)
    bench.found(holder)
    bench.lookups.begin_load(holder)
    assert bench.found(waiting) == 0

    assert bench.lookups.is_worth_waiting(waiting)
    assert bench.lookups.is_loading(holder)
    bench.lookups.end_load(holder)

    def has_all() -> bool:
        is_there = waiting.lease is not None or bench.lookups.take(waiting, 0)
        return is_there and not bench.lookups.is_worth_waiting(waiting)

    until(has_all)
    assert waiting.found_end == 4
    bench.lookups.release(waiting)


@dataclass
class Queue:
    """Prompts that meet the limit while `holder` loads, under a clock that the test turns."""

    bench: Bench
    holder: Lookup
    waiting: list[Lookup]
    now: float = 100.0

    def waits(self) -> list[bool]:
        """Whether each is worth waiting for, as the engine asks in a step."""
        return [self._waits(lookup) for lookup in self.waiting]

    def _waits(self, lookup: Lookup) -> bool:
        if lookup.is_idle:  # what it held made room for another
            self.bench.begin(lookup)
        until(lambda: lookup.lease is not None or self.bench.lookups.take(lookup, 0))
        return self.bench.lookups.is_worth_waiting(lookup)


@pytest.fixture
def queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Queue:
    bench.tier.most_held = 1
    holder, *waiting = [bench.lookup(seed, 4, num_stored=4) for seed in range(1, 9)]
    queue = Queue(bench, holder, waiting)
    clock = SimpleNamespace(monotonic=lambda: queue.now, sleep=time.sleep)
    monkeypatch.setattr("kvtier.transfer.lookup.time", clock)
    bench.found(holder)
    bench.lookups.begin_load(holder)
    for lookup in waiting:
        bench.begin(lookup)
    assert queue.waits() == [True] * len(waiting)
    return queue


def test_a_queue_waits_for_as_long_as_those_before_it_move_on(queue: Queue) -> None:
    lookups = queue.bench.lookups
    num_loaded = 0
    while queue.waiting:
        queue.now += 0.8 * _TIMEOUT_S
        lookups.end_load(queue.holder)
        while all(waits := queue.waits()):
            queue.now += 0.001
        queue.holder = queue.waiting.pop(waits.index(False))
        num_loaded += queue.holder.found_end == 4
        lookups.begin_load(queue.holder)
    lookups.end_load(queue.holder)

    assert num_loaded == 7


def test_one_prompt_at_a_time_gives_up_where_nothing_moves_on(queue: Queue) -> None:
    queue.now += 1.1 * _TIMEOUT_S
    assert queue.waits() == [False, True, True, True, True, True, True]
    assert queue.waits() == [False, True, True, True, True, True, True]

    queue.now += 1.1 * _TIMEOUT_S
    assert queue.waits() == [False, False, True, True, True, True, True]
    queue.bench.lookups.end_load(queue.holder)


def test_a_prompt_that_meets_the_limit_alone_does_not_wait_for_long(bench: Bench) -> None:
    """It is longer than the limit: it takes what it got."""
    lookup = bench.lookup(1, 6, num_stored=4)
    bench.tier.cuts_at = 3
    bench.found(lookup)

    def is_over() -> bool:
        return (lookup.lease is not None or bench.lookups.take(lookup, 0)) and not bench.lookups.is_worth_waiting(
            lookup
        )

    until(is_over)
    assert lookup.num_alone == 8
    assert (lookup.found_end, lookup.end, bench.tier.num_held) == (3, 3, 1)
    bench.lookups.release(lookup)


def test_all_give_up_where_nothing_loads(queue: Queue) -> None:
    """Others hold what this client could: computing one prompt brings no other its turn."""
    queue.bench.tier.most_held = 0
    queue.bench.lookups.end_load(queue.holder)
    assert queue.waits() == [True] * 7
    queue.now += 1.1 * _TIMEOUT_S

    assert queue.waits() == [False] * 7


def test_few_prompts_ask_again_at_a_time_where_nothing_loads(queue: Queue) -> None:
    queue.bench.tier.most_held = 0
    queue.bench.lookups.end_load(queue.holder)
    queue.waits()
    num_asked = len(queue.bench.tier.asked_blocks)
    queue.now += 1.0
    assert queue.waits() == [True] * 7

    until(lambda: all(one.lease is not None or queue.bench.lookups.take(one, 0) for one in queue.waiting))
    assert len(queue.bench.tier.asked_blocks) == num_asked + 4


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_prompt_does_not_wait_for_those_that_came_later(queue: Queue, is_aborted: bool) -> None:
    late = queue.waiting.pop()
    queue.now += 0.6 * _TIMEOUT_S
    queue.bench.lookups.begin_load(late)
    if is_aborted:
        queue.bench.lookups.forget(late)
    queue.bench.lookups.end_load(late)
    queue.now += 0.6 * _TIMEOUT_S

    assert queue.waits()[0] is False
    queue.bench.lookups.end_load(queue.holder)


def test_prompts_overtaken_by_later_ones_give_up_together(queue: Queue) -> None:
    """Else each would wait for as long as all before it together, while new prompts that need less pass them."""
    late = queue.waiting.pop()
    queue.bench.lookups.begin_load(late)
    queue.bench.lookups.end_load(queue.holder)
    queue.bench.tier.most_held = 0
    queue.now += 1.1 * _TIMEOUT_S

    assert queue.waits() == [False] * 6
    queue.bench.lookups.end_load(late)


def test_few_prompts_ask_again_at_a_time(queue: Queue) -> None:
    """Those at the front of the queue: the limit is not fought over, nor the server asked by all."""
    lookups = queue.bench.lookups
    num_asked = len(queue.bench.tier.asked_blocks)
    queue.now += 1.0
    assert queue.waits() == [True] * 7
    until(lambda: all(lookup.lease is not None or lookups.take(lookup, 0) for lookup in queue.waiting))

    assert len(queue.bench.tier.asked_blocks) == num_asked + 4
    assert [lookup.asked_at for lookup in queue.waiting] == [queue.now] * 4 + [100.0] * 3
    lookups.end_load(queue.holder)


def test_what_later_prompts_hold_makes_room_where_nothing_loads(bench: Bench) -> None:
    bench.tier.most_held = 1
    later, now = bench.lookup(1, 4, num_stored=4), bench.lookup(2, 4, num_stored=4)
    bench.found(later)
    bench.found(now)

    def has_all() -> bool:
        is_there = now.lease is not None or bench.lookups.take(now, 0)
        return is_there and not bench.lookups.is_worth_waiting(now)

    until(has_all)
    assert now.found_end == 4
    assert later.is_idle


def test_a_forgotten_prompt_holds_what_it_loads_until_that_is_over(bench: Bench) -> None:
    lookup, loading = bench.lookup(1, 4, num_stored=4), bench.lookup(2, 4, num_stored=4)
    for one in (lookup, loading):
        bench.found(one)
    bench.lookups.begin_load(loading)

    for one in (lookup, loading):
        bench.lookups.forget(one)

    until(lambda: bench.tier.num_held == 1)
    assert loading.lease is not None
    bench.lookups.end_load(loading)
    until(lambda: bench.tier.num_held == 0)
