"""A process that is told which blocks to bring where, over real tiers and a device of plain memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierFull, TierUnavailable
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import EmptyLease, Lease, Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.testing.faults import WrappedTier
from kvtier.testing.tier_contract import LAYOUT, chain, fetch_all, payload, payloads
from kvtier.tiers.host import HostTier
from kvtier.tiers.staged import StagedTier
from kvtier.tiers.tier import Tier
from kvtier.transfer.copier import Copies, Mark
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.load_news import EndedLoad
from kvtier.transfer.storer import Storer
from kvtier.transfer.worker_transfer import WorkerTransfer
from tests.support.host_device import WAIT_S, HostDevice
from tests.support.traffic_bench import FarTier, until

_BATCH_BLOCKS = 4


class _ServerTier(WrappedTier):
    """Memory of this host whose owner may fail, be late, or have read the last blocks from its disk."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.memory = HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes, "server")
        super().__init__(self.memory)
        self.num_ready: int | None = None
        self.most_leased = num_blocks
        self.leases: list[Lease] = []
        self.num_arriving: int | None = None
        self.late_s = 0.0
        self.failure: Exception | None = None
        self.hold = False

    @property
    def is_local(self) -> bool:
        return True

    @property
    def arena(self) -> MappedArena:
        return self.memory.arena

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self._fail()
        num_leased = sum(lease.num_blocks for lease in self.leases if not vars(lease)["_is_over"])
        wanted = hashes[: self.most_leased - num_leased]
        if not wanted:
            return EmptyLease(MatchEnd.LIMIT)
        lease = self.memory.match(wanted, timeout_s=timeout_s)
        self.leases.append(lease)
        if lease.num_blocks == len(wanted) < len(hashes):
            vars(lease)["ended"] = MatchEnd.LIMIT
        if self.num_ready is not None and lease.num_blocks:
            from_disk = vars(lease)
            from_disk["num_ready_at_match"] = from_disk["_num_ready"] = self.num_ready
            from_disk["_arrive"] = self._arrive
        return lease

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        until(lambda: not self.hold)
        self._fail()
        return self.memory.reserve(hashes)

    def _arrive(self, count: int) -> int:
        time.sleep(self.late_s)
        return count if self.num_arriving is None else min(count, self.num_arriving)

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class _HalfBlocks:
    """A device whose pages hold half a block: places `2 * n` and `2 * n + 1` are the halves of its block `n`."""

    is_whole = True

    def __init__(self, device: HostDevice) -> None:
        self._device = device

    def mark(self) -> Mark:
        return self._device.mark()

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        return self._device.load(arena, offsets, self._whole(places), after)

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        return self._device.store(self._whole(places), arena, offsets, after)

    def adopt(self, arena: MappedArena) -> None:
        self._device.adopt(arena)

    def close(self) -> None:
        self._device.close()

    def _whole(self, places: Sequence[int]) -> list[int]:
        assert [place % 2 for place in places] == [0, 1] * (len(places) // 2)
        return [place // 2 for place in places[::2]]


@dataclass
class Bench:
    device: HostDevice
    transfer: WorkerTransfer

    def load(self, hashes: Sequence[BlockHash], places: Sequence[int], timeout_s: float = 10.0) -> EndedLoad:
        self.transfer.note_step()
        self.transfer.load("a", hashes, places, timeout_s)
        over: list[EndedLoad] = []
        until(lambda: bool(over.extend(self.transfer.loads.take()[1]) or over))
        return over[0]

    def store(self, key: str, hashes: Sequence[BlockHash], first_id: int = 0, *, is_last: bool = True) -> None:
        self.transfer.note_step()
        ids = range(first_id, first_id + len(hashes))
        self.transfer.store(key, hashes, self.device.fill(ids, hashes).ids)
        self.transfer.send(is_last=is_last)

    def settle(self) -> None:
        until(lambda: not self.transfer.storing())

    def has(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [self.device.block(number) == payload(block_hash) for number, block_hash in enumerate(hashes)]


Open = Callable[..., Bench]


@pytest.fixture
def open_bench() -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def make(tier: Tier, *, has_small_pages: bool = False, clock: Callable[[], float] = time.monotonic) -> Bench:
            device = HostDevice()
            transfer = WorkerTransfer(
                tier,
                _HalfBlocks(device) if has_small_pages else device,
                batch_bytes=_BATCH_BLOCKS * LAYOUT.slot_bytes,
                parts_per_block=2 if has_small_pages else 1,
                clock=clock,
            )
            stack.callback(transfer.close)
            stack.callback(device.gate.set)
            return Bench(device, transfer)

        yield make


def _staged(far: Tier) -> StagedTier:
    return StagedTier(far, 24 * LAYOUT.slot_bytes)


# --- loads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_far", [False, True])
def test_what_is_cached_comes_byte_for_byte(open_bench: Open, is_far: bool) -> None:
    inner: Tier = FarTier() if is_far else _ServerTier()
    bench = open_bench(_staged(inner) if is_far else inner)
    hashes = chain(1, 9)
    inner.offer(hashes, payloads(hashes))

    ended = bench.load(hashes, range(9))

    assert (ended.key, ended.num_blocks, ended.num_loaded) == ("a", 9, 9)
    assert all(bench.has(hashes))
    assert [(part.tier, part.nbytes) for part in ended.parts] == [
        ("far" if is_far else "server", 9 * LAYOUT.block_bytes)
    ]


@pytest.mark.parametrize("is_far", [False, True])
def test_what_is_cached_in_part_comes_in_part(open_bench: Open, is_far: bool) -> None:
    inner: Tier = FarTier() if is_far else _ServerTier()
    bench = open_bench(_staged(inner) if is_far else inner)
    hashes = chain(1, 6)
    inner.offer(hashes[:4], payloads(hashes[:4]))

    ended = bench.load(hashes, range(6))

    assert ended.num_loaded == 4
    assert bench.has(hashes) == [True] * 4 + [False] * 2


def test_more_than_a_client_may_lease_comes_in_parts(open_bench: Open) -> None:
    tier = _ServerTier()
    tier.most_leased = 4
    bench = open_bench(tier)
    hashes = chain(1, 11)
    tier.offer(hashes[:10], payloads(hashes[:10]))

    ended = bench.load(hashes, range(11))

    assert ended.num_loaded == 10
    assert bench.has(hashes) == [True] * 10 + [False]
    assert [lease.num_blocks for lease in tier.leases] == [4, 4, 2]
    assert sum(part.nbytes for part in ended.parts) == 10 * LAYOUT.block_bytes


def test_a_load_waits_for_what_others_hold_until_its_deadline(open_bench: Open) -> None:
    tier = _ServerTier()
    tier.most_leased = 4
    bench = open_bench(tier)
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    held = tier.match(hashes)
    assert bench.load(hashes, range(6), timeout_s=0.05).num_loaded == 0

    bench.transfer.load("b", hashes, range(6), 60.0)
    held.release()

    over: list[EndedLoad] = []
    until(lambda: bool(over.extend(bench.transfer.loads.take()[1]) or over))
    assert over[0].num_loaded == 6
    assert all(bench.has(hashes))


def _without_room(open_bench: Open) -> tuple[Bench, list[BlockHash], Lease]:
    """Three loads, more than there are threads, that wait for what a lease holds; and a prompt that it covers."""
    tier = _ServerTier()
    tier.most_leased = 4
    bench = open_bench(tier)
    hashes, others = chain(1, 4), chain(2, 4)
    for some in (hashes, others):
        tier.offer(some, payloads(some))
    held = tier.match(hashes)
    for key in "bcd":
        bench.transfer.load(key, others, range(4, 8), 60.0)
    return bench, hashes, held


def test_loads_that_wait_for_room_hold_up_no_load_whose_blocks_are_leased(open_bench: Open) -> None:
    """They may wait for just these leases."""
    bench, hashes, held = _without_room(open_bench)
    assert held.arena is not None
    leased = LeasedBlocks(held.arena.inode, list(held.offsets))
    bench.transfer.load("a", hashes, range(4), 60.0, leased)

    over: list[EndedLoad] = []
    until(lambda: bool(over.extend(bench.transfer.loads.take()[1]) or over))
    assert [(ended.key, ended.num_loaded) for ended in over] == [("a", 4)]
    held.release()
    until(lambda: over.extend(bench.transfer.loads.take()[1]) or len(over) == 4)
    assert {(ended.key, ended.num_loaded) for ended in over[1:]} == {(key, 4) for key in "bcd"}


def test_a_worker_that_ends_does_not_wait_for_room(open_bench: Open) -> None:
    bench, _, held = _without_room(open_bench)
    started_at = time.monotonic()

    bench.transfer.close()

    assert time.monotonic() - started_at < WAIT_S
    assert [ended.num_loaded for ended in bench.transfer.loads.take()[1]] == [0, 0, 0]
    held.release()


def test_nothing_cached_is_an_answer(open_bench: Open) -> None:
    ended = open_bench(_ServerTier()).load(chain(1, 3), range(3))

    assert (ended.num_loaded, ended.parts) == (0, [])


def test_blocks_from_disk_are_told_from_those_in_memory(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    tier.num_ready = 2

    ended = bench.load(hashes, range(6))

    assert all(bench.has(hashes))
    assert [(part.tier, part.nbytes // LAYOUT.block_bytes) for part in ended.parts] == [("server", 2), ("disk", 4)]


def test_what_came_before_a_lost_block_counts(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    tier.num_ready, tier.num_arriving = 2, 3

    ended = bench.load(hashes, range(6))

    assert ended.num_loaded == 3
    assert bench.has(hashes) == [True] * 3 + [False] * 3


def test_nothing_is_written_after_the_deadline(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    tier.num_ready, tier.late_s = 2, 0.6

    ended = bench.load(hashes, range(6), timeout_s=0.5)

    assert ended.num_loaded == 2
    assert bench.has(hashes) == [True] * 2 + [False] * 4


@pytest.mark.parametrize("failure", [TierUnavailable("gone"), RuntimeError("a bug")])
def test_a_load_that_fails_ends_with_nothing(open_bench: Open, failure: Exception) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    tier.failure = failure

    assert bench.load(chain(1, 3), range(3)).num_loaded == 0


def test_a_device_that_fails_loads_nothing(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    hashes = chain(1, 3)
    tier.offer(hashes, payloads(hashes))
    bench.device.late_error = TierUnavailable("the device fails")

    assert bench.load(hashes, range(3)).num_loaded == 0


def test_small_pages_are_loaded_and_stored_part_by_part(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier, has_small_pages=True)
    hashes, others = chain(1, 5), chain(2, 3)
    tier.offer(hashes, payloads(hashes))

    assert bench.load(hashes, range(10)).num_loaded == 5
    assert all(bench.has(hashes))

    bench.device.fill([8, 9, 10], others)
    bench.transfer.store("b", others, range(16, 22))
    bench.transfer.send()
    bench.settle()
    until(lambda: all(tier.contains(others)))
    assert fetch_all(tier, others) == payloads(others)


class _CountingTier(_ServerTier):
    def __init__(self) -> None:
        super().__init__()
        self.num_matches = 0

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        self.num_matches += 1
        return super().match(hashes, timeout_s=timeout_s)


@pytest.mark.parametrize("is_same_memory", [True, False])
def test_blocks_that_are_leased_already_are_matched_only_if_they_lie_in_other_memory(
    open_bench: Open, is_same_memory: bool
) -> None:
    tier = _CountingTier()
    bench = open_bench(tier)
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    with tier.memory.match(hashes[2:]) as lease:
        leased = LeasedBlocks(tier.arena.inode + (not is_same_memory), list(lease.offsets))
        bench.transfer.load("a", hashes[2:], range(2, 6), 10.0, leased)
        over: list[EndedLoad] = []
        until(lambda: bool(over.extend(bench.transfer.loads.take()[1]) or over))

    assert over[0].num_loaded == 4
    assert bench.has(hashes)[2:] == [True] * 4
    assert tier.num_matches == (0 if is_same_memory else 1)


@pytest.mark.parametrize("is_idle", [True, False])
def test_where_the_device_is_idle_a_load_is_told_of_before_its_last_blocks_are_there(
    open_bench: Open, is_idle: bool
) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    bench.device.later_gate = threading.Event()
    loads = bench.transfer.loads
    bench.transfer.begin_step(is_idle=is_idle)
    bench.transfer.load("a", hashes, range(6), 10.0)

    until(lambda: len(bench.device.transfers) == 2 and bench.device.transfers[0].is_done)
    if is_idle:
        loads.wait_for_arrival(WAIT_S)
        (arrived,), over = loads.take()
        assert (arrived.num_loaded, over) == (6, [])
        assert arrived.arriving == bench.device.transfers[1:]
    else:
        assert loads.take() == ([], [])
    bench.device.later_gate.set()
    over = []
    until(lambda: bool(over.extend(loads.take()[1]) or over))
    assert over[0].num_loaded == 6
    assert all(bench.has(hashes))


def test_where_the_device_is_busy_a_load_is_told_of_two_steps_early(open_bench: Open) -> None:
    tier = _ServerTier()
    now = [0.0]
    bench = open_bench(tier, clock=lambda: now[0])
    hashes = chain(1, 6)
    tier.offer(hashes, payloads(hashes))
    bench.transfer.begin_step(is_idle=False)
    bench.load(hashes, range(6))  # shows how fast the tier is
    now[0] += 1e6
    bench.transfer.begin_step(is_idle=False)
    bench.device.transfers.clear()
    bench.device.later_gate = threading.Event()
    loads = bench.transfer.loads
    bench.transfer.load("b", hashes, range(6, 12), 10.0)

    loads.wait_for_arrival(WAIT_S)
    (arrived,), over = loads.take()
    assert (arrived.key, arrived.num_loaded, over) == ("b", 6, [])
    assert arrived.arriving == bench.device.transfers[1:]
    assert not arrived.arriving[-1].is_done
    bench.device.later_gate.set()
    until(lambda: bool(loads.take()[1]))
    assert [bench.device.block(6 + number) for number in range(6)] == payloads(hashes)


# --- stores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_far", [False, True])
def test_what_is_stored_is_in_the_tier_byte_for_byte(open_bench: Open, is_far: bool) -> None:
    inner: Tier = FarTier() if is_far else _ServerTier()
    bench = open_bench(_staged(inner) if is_far else inner)
    hashes = chain(1, 10)

    bench.store("a", hashes)
    bench.settle()

    until(lambda: bench.transfer.num_stored == 10)
    assert fetch_all(inner, hashes) == payloads(hashes)
    assert bench.transfer.num_refused == 0
    assert max(map(len, bench.device.stored)) == _BATCH_BLOCKS


def test_a_prompt_longer_than_the_staging_memory_is_stored(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(StagedTier(far, _BATCH_BLOCKS * LAYOUT.slot_bytes))
    hashes = chain(1, 14)

    bench.store("a", hashes)
    until(lambda: bench.transfer.num_stored == 14)

    assert fetch_all(far, hashes) == payloads(hashes)


def test_the_same_blocks_of_two_prompts_are_stored_once(open_bench: Open) -> None:
    far = FarTier()
    bench = open_bench(_staged(far))
    hashes = chain(1, 2)
    for key, first_id in (("a", 0), ("b", 2)):
        bench.transfer.store(key, hashes, bench.device.fill([first_id, first_id + 1], hashes).ids)
    bench.transfer.send()

    until(lambda: bench.transfer.num_stored == 2)
    bench.settle()


def test_a_key_is_storing_until_its_blocks_are_copied(open_bench: Open) -> None:
    bench = open_bench(_ServerTier())
    bench.device.gate.clear()
    bench.store("a", chain(1, 2))
    until(lambda: bool(bench.device.stored))

    assert bench.transfer.storing() == {"a"}
    bench.device.gate.set()
    bench.settle()


def test_a_dropped_key_that_waits_for_the_tier_is_never_copied(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    tier.hold = True
    dropped, kept = chain(1, 2), chain(2, 2)
    bench.store("a", dropped)
    bench.store("b", kept, first_id=2)

    bench.transfer.drop({"a"})
    bench.device.fill([0, 1], chain(3, 2))
    tier.hold = False
    bench.settle()

    until(lambda: all(tier.contains(kept)))
    assert tier.contains(dropped) == [False, False]
    assert bench.device.stored == [[2, 3]]
    assert bench.transfer.num_refused == 0


@pytest.fixture
def waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a small batch waits for the next call."""
    monkeypatch.setattr("kvtier.transfer.storer._BATCH_S", 3600.0)


@pytest.mark.usefixtures("waits_for_long")
def test_a_few_blocks_wait_for_those_of_later_calls_and_are_stored_with_them(open_bench: Open) -> None:
    bench = open_bench(_ServerTier())
    one, other = chain(1, 2), chain(2, 1)
    bench.store("a", one, is_last=False)
    assert bench.transfer.storing() == {"a"}

    bench.store("b", other, first_id=2)
    bench.settle()

    assert bench.device.stored == [[0, 1, 2]]


def test_a_few_blocks_do_not_wait_for_long(open_bench: Open) -> None:
    bench = open_bench(_ServerTier())
    bench.store("a", chain(1, 2), is_last=False)

    def is_stored() -> bool:
        bench.transfer.send(is_last=False)
        return not bench.transfer.storing()

    until(is_stored)
    assert bench.device.stored == [[0, 1]]


def test_a_few_blocks_are_stored_though_no_call_follows(open_bench: Open) -> None:
    """An engine that has answered its last request makes no more steps."""
    bench = open_bench(_ServerTier())
    bench.store("a", chain(1, 2), is_last=False)

    until(lambda: bench.device.stored == [[0, 1]])


def test_blocks_are_not_stored_before_the_step_that_fills_them(
    open_bench: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that waits goes on waiting once more is offered: its mark is before the step of these blocks."""
    looks: list[object] = []
    send_late = Storer._send_late

    def look(storer: Storer, late: object) -> bool:
        looks.append(late)
        return send_late(storer, late)

    monkeypatch.setattr("kvtier.transfer.storer._BATCH_S", 0.001)
    monkeypatch.setattr(Storer, "_send_late", look)
    bench = open_bench(_ServerTier())
    bench.store("a", chain(1, 1), is_last=False)
    other = chain(2, 1)
    bench.transfer.store("b", other, bench.device.fill([1], other).ids)
    num_looks = len(looks)

    until(lambda: len(looks) > num_looks + 3 or bool(bench.device.stored))
    assert bench.device.stored in ([], [[0]])
    bench.transfer.send()
    bench.settle()
    assert sorted(number for stored in bench.device.stored for number in stored) == [0, 1]


@pytest.mark.usefixtures("waits_for_long")
def test_a_dropped_key_that_waits_for_later_calls_is_never_copied(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    dropped, kept = chain(1, 2), chain(2, 2)
    bench.store("a", dropped, is_last=False)
    bench.store("b", kept, first_id=2, is_last=False)

    bench.transfer.drop({"a"})
    assert bench.transfer.storing() == {"b"}
    bench.device.fill([0, 1], chain(3, 2))
    bench.transfer.send()
    bench.settle()

    until(lambda: all(tier.contains(kept)))
    assert tier.contains(dropped) == [False, False]
    assert bench.device.stored == [[2, 3]]


def test_a_drop_waits_for_what_is_being_copied(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    hashes = chain(1, 2)
    bench.device.gate.clear()
    bench.store("a", hashes)
    until(lambda: bool(bench.device.stored))
    opened_at: list[float] = []

    def open_gate() -> None:
        time.sleep(0.05)
        opened_at.append(time.monotonic())
        bench.device.gate.set()

    with _beside(open_gate):
        bench.transfer.drop({"a"})
        assert time.monotonic() >= opened_at[0]

    until(lambda: all(tier.contains(hashes)))
    assert fetch_all(tier, hashes) == payloads(hashes)


def test_blocks_that_a_failing_tier_does_not_take_are_refused(open_bench: Open) -> None:
    tier = _ServerTier()
    bench = open_bench(tier)
    tier.failure = TierUnavailable("gone")

    bench.store("a", chain(1, 3))
    bench.settle()

    assert (bench.transfer.num_stored, bench.transfer.num_refused) == (0, 3)


class _FullTier(FarTier):
    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> int:
        raise TierFull("full")


def test_blocks_that_a_far_tier_has_no_room_for_are_refused(open_bench: Open) -> None:
    bench = open_bench(_staged(_FullTier()))

    bench.store("a", chain(1, 3))

    until(lambda: bench.transfer.num_refused == 3)
    bench.settle()
    assert bench.transfer.num_stored == 0


@contextlib.contextmanager
def _beside(act: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()
