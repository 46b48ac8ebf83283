"""Blocks that several ranks write together: shown when all have written, given back when one has not."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.errors import TierUnavailable
from kvtier.memory.lease import Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.testing.tier_contract import LAYOUT, chain, fetch_all, payloads
from kvtier.tiers.host import HostTier
from kvtier.transfer.shared_stores import ReservedRoom, SharedStores, ShareWriter
from tests.support.host_device import HostDevice, Past
from tests.support.traffic_bench import until


class _Client:
    """Of a server whose memory is this process's."""

    def __init__(self) -> None:
        self.memory = HostTier(LAYOUT, 8 * LAYOUT.slot_bytes)
        self.is_away = False
        self.num_pings = 0

    @property
    def arena(self) -> MappedArena:
        if self.is_away:
            raise TierUnavailable("away")
        return self.memory.arena

    def ping(self) -> None:
        self.num_pings += 1
        self.is_away = False

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation:
        if self.is_away:
            raise TierUnavailable("away")
        return self.memory.reserve(hashes)


@dataclass
class Bench:
    client: _Client
    stores: SharedStores[str]
    ranks: list[ShareWriter]
    devices: list[HostDevice]

    def begin(self, hashes: list[BlockHash], key: str = "a") -> list[tuple[str, ReservedRoom]]:
        """What is told to the ranks."""
        self.stores.begin(key, hashes, f"blocks of {key}")
        ready: list[tuple[str, ReservedRoom]] = []
        until(lambda: bool(ready.extend(self.stores.take_ready())) or not self.stores.is_waiting(key))
        return ready

    def write(self, hashes: list[BlockHash], slots: ReservedRoom, ranks: Sequence[int] = (0, 1)) -> None:
        wanted = [hashes[position] for position in slots.positions]
        for rank in ranks:
            places = self.devices[rank].fill(range(len(wanted)), wanted).ids
            self.ranks[rank].write("a", places, slots, Past())

    def note_ended(self, count: int) -> list[bool]:
        """`count` shares are over, and the scheduler hears of it."""
        ended: list[tuple[ReservedRoom, bool]] = []
        until(lambda: bool([ended.extend(rank.take_ended()) for rank in self.ranks]) and len(ended) == count)
        written = Counter(slots.job for slots, _ in ended)
        self.stores.note(written, {slots.job for slots, is_written in ended if not is_written})
        return [is_written for _, is_written in ended]

    def is_free(self) -> bool:
        with self.client.memory.reserve(chain(99, 8)) as reservation:
            return reservation.num_blocks == 8


@pytest.fixture
def bench() -> Iterator[Bench]:
    client = _Client()
    devices = [HostDevice(), HostDevice()]
    with contextlib.ExitStack() as stack:
        stack.callback(client.memory.close)
        threads = stack.enter_context(ThreadPoolExecutor(2))
        stores: SharedStores[str] = SharedStores(cast(CacheClient, client), 2, threads)
        stack.callback(stores.close)
        ranks = [ShareWriter(cast(CacheClient, client), device) for device in devices]
        for rank, device in zip(ranks, devices, strict=True):
            stack.callback(rank.close)
            stack.callback(device.gate.set)
        yield Bench(client, stores, ranks, devices)


def test_blocks_are_shown_when_every_rank_has_written(bench: Bench) -> None:
    hashes = chain(1, 3)
    ((store, slots),) = bench.begin(hashes)
    assert store == "blocks of a"

    bench.write(hashes, slots, ranks=[0])
    assert bench.note_ended(1) == [True]
    assert bench.client.memory.contains(hashes) == [False] * 3

    bench.write(hashes, slots, ranks=[1])
    assert bench.note_ended(1) == [True]
    until(lambda: all(bench.client.memory.contains(hashes)))
    assert fetch_all(bench.client.memory, hashes) == payloads(hashes)
    assert bench.ranks[0].keys() == set()


def test_what_is_cached_already_is_not_written(bench: Bench) -> None:
    hashes = chain(1, 3)
    bench.client.memory.offer(hashes[:2], payloads(hashes[:2]))

    ((_, slots),) = bench.begin(hashes)
    assert slots.positions == [2]
    bench.write(hashes, slots)
    bench.note_ended(2)
    until(lambda: all(bench.client.memory.contains(hashes)))
    assert bench.begin(hashes) == []


def test_a_rank_that_fails_gives_the_blocks_back(bench: Bench) -> None:
    hashes = chain(1, 3)
    ((_, slots),) = bench.begin(hashes)
    bench.devices[1].error = TierUnavailable("the device fails")

    bench.write(hashes, slots)
    assert sorted(bench.note_ended(2)) == [False, True]

    until(bench.is_free)
    assert bench.ranks[1].num_refused == 3
    assert bench.client.memory.contains(hashes) == [False] * 3


def test_a_share_that_was_dropped_is_not_written(bench: Bench) -> None:
    first, second = chain(1, 2), chain(2, 2)
    bench.devices[0].gate.clear()
    ((_, one),) = bench.begin(first)
    bench.write(first, one, ranks=[0])
    until(lambda: bool(bench.devices[0].stored))
    ((_, other),) = bench.begin(second, "b")
    bench.ranks[0].write("b", [4, 5], other, Past())

    bench.ranks[0].drop({"b"})
    bench.devices[0].gate.set()

    assert bench.note_ended(2) == [True, False]
    assert bench.devices[0].stored == [[0, 1]]


def test_a_store_that_was_dropped_before_it_is_told_gives_its_room_back(bench: Bench) -> None:
    bench.stores.begin("a", chain(1, 2), "")

    assert bench.stores.drop("a")
    assert not bench.stores.drop("a")
    until(bench.is_free)
    assert bench.stores.take_ready() == []


def test_a_server_that_is_away_keeps_nothing(bench: Bench) -> None:
    bench.client.is_away = True

    assert bench.begin(chain(1, 2)) == []


def test_a_rank_comes_back_to_the_same_server_and_refuses_another(bench: Bench) -> None:
    hashes = chain(1, 2)
    ((_, slots),) = bench.begin(hashes)
    bench.client.is_away = True
    bench.write(hashes, slots, ranks=[0])
    assert bench.note_ended(1) == [True]
    assert bench.client.num_pings == 1

    other = ReservedRoom(slots.job, os.getpid(), slots.arena_inode + 1, slots.positions, slots.offsets)
    bench.write(hashes, other, ranks=[1])
    assert bench.note_ended(1) == [False]
    until(bench.is_free)


def test_room_whose_holder_is_gone_is_not_written(bench: Bench) -> None:
    hashes = chain(1, 2)
    ((_, slots),) = bench.begin(hashes)
    gone = ReservedRoom(slots.job, 2**22 + 1, slots.arena_inode, slots.positions, slots.offsets)

    bench.write(hashes, gone)

    assert bench.note_ended(2) == [False, False]
    assert bench.devices[0].stored == []
