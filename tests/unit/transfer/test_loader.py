"""How much of a load comes together, and ahead, by the memory that it passes through. Others: test_traffic."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.errors import TierUnavailable
from kvtier.memory.lease import DISK, BlockLease
from kvtier.memory.mapped import MappedArena
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.remote import RemoteTier
from kvtier.transfer.copier import Copier, Mark
from kvtier.transfer.load import Load, LoadPlan, Order, Span
from kvtier.transfer.loader import Loader
from tests.support.waiting import LIMIT_S

_LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float16")


def _bringing(num_host_blocks: int | None) -> Loader:
    host = None if num_host_blocks is None else SimpleNamespace(num_blocks=num_host_blocks)
    return Loader(cast(Hierarchy, SimpleNamespace(host=host)), cast(Copier, None), lambda: None)


class _Client:
    layout = _LAYOUT

    def __init__(self, num_slots: int | None, is_local: bool) -> None:
        self._num_slots = num_slots
        self.is_local = is_local

    @property
    def arena(self) -> object:
        if self._num_slots is None:
            raise TierUnavailable("it is away")
        return SimpleNamespace(nbytes=self._num_slots * _LAYOUT.slot_bytes)


def _client(num_slots: int | None, is_local: bool = True) -> Any:
    return _Client(num_slots, is_local)


@pytest.mark.parametrize(
    ("num_slots", "expected"), [(10_000, 70), (70 * 48, 70), (480, 10), (48, 1), (5, 1), (None, 70)]
)
def test_units_are_a_small_part_of_a_servers_memory(num_slots: int | None, expected: int) -> None:
    assert _bringing(None)._unit_blocks(70, RemoteTier(_client(num_slots))) == expected


@pytest.mark.parametrize(("num_blocks", "expected"), [(None, 70), (10_000, 70), (240, 10), (5, 1)])
def test_units_from_elsewhere_are_a_small_part_of_the_hosts_tier(num_blocks: int | None, expected: int) -> None:
    assert _bringing(num_blocks)._unit_blocks(70, RemoteTier(_client(None, is_local=False))) == expected


def test_units_fit_into_the_smaller_memory() -> None:
    assert _bringing(240)._unit_blocks(70, RemoteTier(_client(960))) == 10
    assert _bringing(480)._unit_blocks(70, RemoteTier(_client(480))) == 10


_MIB = 1 << 20


class _Disk:
    """A server of this host that has everything on its disk, a MiB a block. Nothing arrives before `arrive`."""

    name = "server"
    layout = SimpleNamespace(slot_bytes=_MIB)

    def __init__(self, arena_bytes: int, *, is_local: bool = True) -> None:
        self.arena = SimpleNamespace(nbytes=arena_bytes) if is_local else None
        self.is_open = threading.Event()
        self.leased = threading.Semaphore(0)
        self.num_leased = 0
        self.num_refusals = 0
        self.failure: Exception | None = None

    def match(self, hashes: Sequence[BlockHash]) -> BlockLease:
        if self.num_refusals:
            self.num_refusals -= 1
            return _DiskLease(self, 0)
        self.num_leased += len(hashes)
        self.leased.release(len(hashes))
        return _DiskLease(self, len(hashes))


class _DiskLease(BlockLease):
    def __init__(self, disk: _Disk, num_blocks: int) -> None:
        self._disk = disk
        self.offsets = range(num_blocks)

    @property
    def arena(self) -> MappedArena | None:
        return cast("MappedArena | None", self._disk.arena)

    @property
    def num_blocks(self) -> int:
        return len(self.offsets)

    def wait(self, count: int | None = None) -> int:
        self._disk.is_open.wait()
        if self._disk.failure is not None:
            raise self._disk.failure
        return self.num_blocks

    def fetch(self, into: Sequence[object], first: int = 0) -> int:
        return self.wait()

    def release(self) -> None:
        self._disk.num_leased -= self.num_blocks


class _Copier:
    def adopt(self, arena: object) -> None:
        pass

    def load(self, arena: object, offsets: object, block_ids: object, after: object) -> object:
        return SimpleNamespace(is_done=True, wait=lambda: None)


class _Loads:
    """Loads from one disk, by threads of their own."""

    def __init__(self, disk: _Disk) -> None:
        self.disk = disk
        host = None if disk.arena is not None else _Host()
        guard = SimpleNamespace(tier=disk, watched=contextlib.nullcontext)
        hierarchy = SimpleNamespace(host=host, guards=[guard])
        self.bringing = Loader(cast(Hierarchy, hierarchy), cast(Copier, _Copier()), lambda: None)
        self.brought: list[int] = []
        self.errors: list[Exception] = []
        self._threads: list[threading.Thread] = []

    def begin(self, num_blocks: int, unit: int, order: Order = Order.FRONT) -> None:
        span = Span(DISK, "server", 0, num_blocks, None, 0)
        plan = LoadPlan(span, 0, num_blocks, order, None, unit)
        hashes = [BlockHash(bytes(32))] * num_blocks
        load = Load(plan, hashes, range(num_blocks), cast(Mark, None), 0.0)
        self._threads.append(threading.Thread(target=self._bring, args=(load,), daemon=True))
        self._threads[-1].start()

    def _bring(self, load: Load) -> None:
        try:
            self.brought.append(self.bringing.bring(load))
        except TierUnavailable as error:
            self.errors.append(error)

    def leased(self, num_more: int) -> int:
        """What is leased of the disk once that are `num_more` than the last time, and no more come."""
        for _ in range(num_more):
            assert self.disk.leased.acquire(timeout=LIMIT_S)
        assert not self.disk.leased.acquire(timeout=0.1)
        return self.disk.num_leased

    def end(self) -> None:
        self.disk.is_open.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert self.disk.num_leased == 0
        assert vars(self.bringing._ahead)["_num_loads"] == vars(self.bringing._ahead)["_nbytes"] == 0


class _Host:
    num_blocks = 1 << 20
    arena = SimpleNamespace(nbytes=1 << 40)

    def stage(self, hashes: Sequence[BlockHash]) -> object:
        return SimpleNamespace(
            offsets=range(len(hashes)), views=list, commit=lambda first, count: None, close=lambda: None
        )


def test_one_load_reads_what_keeps_a_disk_busy_ahead() -> None:
    loads = _Loads(_Disk(16 << 30))
    loads.begin(1000, unit=64)

    assert loads.leased(256) == 256
    loads.end()
    assert loads.brought == [1000]


def test_loads_share_what_is_read_ahead() -> None:
    loads = _Loads(_Disk(16 << 30))
    loads.begin(1000, unit=64)
    loads.leased(256)
    for number in range(1, 4):  # the first has it all, so that the others have a unit each
        loads.begin(1000, unit=64)
        assert loads.leased(64) == 256 + number * 64
    loads.end()
    assert loads.brought == [1000] * 4


def test_a_quarter_of_a_small_servers_memory_is_read_ahead_and_a_unit_for_each_load() -> None:
    loads = _Loads(_Disk(480 * _MIB))
    loads.begin(1000, unit=10)
    assert loads.leased(120) == 120
    loads.begin(1000, unit=10)
    assert loads.leased(10) == 130
    loads.end()
    assert loads.brought == [1000, 1000]


def test_a_load_that_meets_what_is_computed_takes_on_a_few_units() -> None:
    """What it has taken on is not computed: it must not be all of the prompt."""
    loads = _Loads(_Disk(16 << 30))
    loads.begin(140, unit=4, order=Order.BACK)

    assert loads.leased(48) == 48
    loads.end()
    assert loads.brought == [140]


def test_what_comes_from_elsewhere_does_not_count_as_read_ahead() -> None:
    away = _Loads(_Disk(16 << 30, is_local=False))
    away.begin(1000, unit=64)
    assert away.leased(3 * 64) == 3 * 64
    assert vars(away.bringing._ahead)["_num_loads"] == 0
    away.end()
    assert away.brought == [1000]


def test_a_load_whose_first_blocks_are_gone_ends_there() -> None:
    loads = _Loads(_Disk(16 << 30))
    loads.disk.num_refusals = 1
    loads.disk.is_open.set()
    loads.begin(1000, unit=64)
    loads.end()

    assert loads.brought == [0]
    assert loads.errors == []


def test_nothing_stays_counted_of_loads_that_fail() -> None:
    loads = _Loads(_Disk(16 << 30))
    loads.disk.failure = TierUnavailable("it is away")
    for _ in range(3):
        loads.begin(1000, unit=64)
    loads.leased(256 + 2 * 64)
    loads.end()

    assert len(loads.errors) == 3
