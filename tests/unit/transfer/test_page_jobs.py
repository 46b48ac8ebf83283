"""Jobs between an engine's pages and a server: each ends exactly once, and no page is taken for another."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierFull, TierUnavailable
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.transfer.page_jobs import EndedJob, PageJob, PageJobs, page_hashes
from tests.support.waiting import wait_until

_PAGE_BYTES = 64
_NUM_ROWS = 32


class _FoundPages(EmptyLease):
    """A lease on bytes, which ends where a page is damaged."""

    def __init__(self, server: _Server, hashes: Sequence[BlockHash], ended: MatchEnd) -> None:
        super().__init__(ended)
        self._server = server
        self._hashes = hashes
        self.num_blocks = len(hashes)
        server.num_leases += 1

    def fetch(self, into: Sequence[Buffer], first: int = 0) -> int:
        for position, (target, block_hash) in enumerate(zip(into, self._hashes, strict=True)):
            if block_hash in self._server.damaged:
                return position
            cast("memoryview", target)[:] = self._server.pages[block_hash]
        return len(into)

    def __exit__(self, *error: object) -> None:
        self._server.num_leases -= 1


class _Server:
    """Pages by their hash, in a server that can be away, full, or take its time."""

    def __init__(self) -> None:
        self.pages: dict[BlockHash, bytes] = {}
        self.damaged: set[BlockHash] = set()
        self.is_away = False
        self.is_full = False
        self.is_broken = False
        self.num_leases = 0
        self.num_matches = 0
        self.is_open = threading.Event()
        self.is_open.set()

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        assert self.is_open.wait(60)
        self.num_matches += 1
        if self.is_broken:
            raise AssertionError("a bug")
        if self.is_away:
            return EmptyLease(MatchEnd.TIER_DOWN)
        found = []
        for block_hash in hashes:
            if block_hash not in self.pages:
                break
            found.append(block_hash)
        return _FoundPages(self, found, MatchEnd.ALL if len(found) == len(hashes) else MatchEnd.NEVER_STORED)

    def store(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> list[int]:
        assert self.is_open.wait(60)
        if self.is_full:
            raise TierFull("no room")
        if self.is_broken:
            raise TierUnavailable("gone")
        if self.is_away:
            return []
        written = [position for position, one in enumerate(hashes) if one not in self.pages]
        self.pages |= {hashes[position]: bytes(blocks[position]) for position in written}
        return written

    def contains(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[bool]:
        return [not self.is_away and one in self.pages for one in hashes]


class Bench:
    def __init__(self) -> None:
        self.server = _Server()
        self.memory = bytearray(_PAGE_BYTES * _NUM_ROWS)
        self.jobs = PageJobs(self.server, memoryview(self.memory), _PAGE_BYTES)
        self.ended: list[EndedJob] = []

    def fill(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.memory[row * _PAGE_BYTES : (row + 1) * _PAGE_BYTES] = bytes([row + 1]) * _PAGE_BYTES

    def row(self, row: int) -> bytes:
        return bytes(self.memory[row * _PAGE_BYTES : (row + 1) * _PAGE_BYTES])

    def wait(self) -> list[EndedJob]:
        """What has ended once nothing is under way."""
        self.jobs.drain()
        return self.jobs.take_ended()

    def stored(self, count: int) -> list[bytes]:
        """Keys of pages that the server has, made of the first rows."""
        keys = _keys(count)
        self.fill(range(count))
        self.jobs.store(PageJob(999, "stored", keys, range(count)))
        assert [one.is_done for one in self.wait()] == [True]
        return keys


def _keys(count: int, name: str = "page") -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.server.is_open.set()
    bench.jobs.close()
    assert not bench.server.num_leases


def test_what_was_stored_is_loaded_into_other_rows(bench: Bench) -> None:
    keys = bench.stored(4)

    bench.jobs.load(PageJob(2, "b", keys, [10, 12, 11, 20]))
    (ended,) = bench.wait()

    assert (ended.job.number, ended.is_load, ended.is_done) == (2, True, True)
    assert [bench.row(row) for row in (10, 12, 11, 20)] == [bench.row(row) for row in range(4)]


def test_pages_that_are_there_already_count_as_stored(bench: Bench) -> None:
    keys = bench.stored(4)

    bench.jobs.store(PageJob(2, "b", [*keys, b"new"], range(5)))

    assert [one.is_done for one in bench.wait()] == [True]


def test_a_page_evicted_between_lookup_and_load_is_a_failure_and_the_others_come(bench: Bench) -> None:
    keys = bench.stored(5)
    del bench.server.pages[page_hashes(keys)[2]]

    bench.jobs.load(PageJob(2, "b", keys, range(10, 15)))
    (ended,) = bench.wait()

    assert list(ended.is_there) == [True, True, False, True, True]
    assert ended.missing_keys == [keys[2]]
    assert bench.row(12) == bytes(_PAGE_BYTES)


def test_a_page_that_is_lost_while_it_is_read_is_a_failure(bench: Bench) -> None:
    keys = bench.stored(3)
    bench.server.damaged = {page_hashes(keys)[1]}

    bench.jobs.load(PageJob(2, "b", keys, range(10, 13)))
    (ended,) = bench.wait()

    assert list(ended.is_there) == [True, False, True]


def test_a_load_of_pages_of_which_none_is_there_asks_a_bounded_number_of_times(bench: Bench) -> None:
    bench.jobs.load(PageJob(2, "b", _keys(32, "absent"), range(32)))
    (ended,) = bench.wait()

    assert not any(ended.is_there)
    assert bench.server.num_matches < 12


@pytest.mark.parametrize("fault", ["is_away", "is_broken"])
def test_jobs_with_a_server_that_is_gone_end(bench: Bench, fault: str) -> None:
    keys = bench.stored(2)
    setattr(bench.server, fault, True)

    bench.jobs.load(PageJob(2, "b", keys, [4, 5]))
    bench.jobs.store(PageJob(3, "c", [b"new"], [6]))

    assert {one.job.number: any(one.is_there) for one in bench.wait()} == {2: False, 3: False}


def test_a_server_without_room_fails_the_store(bench: Bench) -> None:
    bench.server.is_full = True

    bench.jobs.store(PageJob(1, "a", _keys(2), [0, 1]))

    assert [one.is_done for one in bench.wait()] == [False]


def test_loads_do_not_wait_for_stores(bench: Bench) -> None:
    class _SlowStores(_Server):
        def store(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> list[int]:
            assert is_loaded.wait(60)
            return super().store(hashes, blocks)

    is_loaded = threading.Event()
    jobs = PageJobs(_SlowStores(), memoryview(bench.memory), _PAGE_BYTES)
    jobs.store(PageJob(1, "a", _keys(1), [0]))
    jobs.load(PageJob(2, "b", _keys(1), [1]))
    ended: list[EndedJob] = []
    wait_until(lambda: ended.extend(jobs.take_ended()) or ended, "the load's end")

    assert [one.job.number for one in ended] == [2]
    is_loaded.set()
    jobs.close()


def test_stores_beyond_half_of_the_memory_fail_at_once(bench: Bench) -> None:
    bench.server.is_open.clear()
    for number in range(4):
        bench.jobs.store(PageJob(number, "a", _keys(8, str(number)), range(8)))

    assert [one.job.number for one in bench.jobs.take_ended()] == [2, 3]
    bench.server.is_open.set()
    assert {one.job.number: one.is_done for one in bench.wait()} == {0: True, 1: True}


def test_closing_fails_what_waits_and_tells_of_it(bench: Bench) -> None:
    bench.server.is_open.clear()
    bench.fill(range(3))
    for number in range(3):
        bench.jobs.store(PageJob(number, "a", _keys(1, str(number)), [number]))
    closing = threading.Thread(target=bench.jobs.close)
    closing.start()
    wait_until(lambda: bench.jobs.is_closing, "the close")
    bench.server.is_open.set()
    closing.join()

    assert sorted(one.job.number for one in bench.jobs.take_ended()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_job_ends_exactly_once_whatever_the_server_does(bench: Bench, seed: int) -> None:
    dice = random.Random(seed)
    bench.fill(range(_NUM_ROWS))
    ended: list[EndedJob] = []
    for number in range(200):
        if dice.random() < 0.2:
            setattr(bench.server, dice.choice(["is_away", "is_full", "is_broken"]), dice.random() < 0.5)
        rows = dice.sample(range(8), dice.randint(1, 4))
        job = PageJob(number, str(number), [f"{row}".encode() for row in rows], rows)
        (bench.jobs.load if dice.random() < 0.5 else bench.jobs.store)(job)
        if dice.random() < 0.3:
            ended += bench.jobs.take_ended()
    ended += bench.wait()

    assert Counter(one.job.number for one in ended) == Counter(range(200))
    assert [bench.row(row) for row in range(8)] == [bytes([row + 1]) * _PAGE_BYTES for row in range(8)]
