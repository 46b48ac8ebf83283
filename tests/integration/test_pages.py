"""Another engine's pages in a real cache server: stored, found, leased, loaded; and what becomes of jobs without it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import kvtier
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.signals import is_stopped
from kvtier.transfer.page_jobs import EndedJob, PageJob, PageJobs
from kvtier.transfer.page_lookups import PageLookups
from tests.support.waiting import CALL_S, wait_until

_PAGE_BYTES = 8192
_NUM_ROWS = 32
_LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=_PAGE_BYTES // 2, dtype="float8_e4m3fn", block_tokens=1)
_KEYS = [f"page {number}".encode() for number in range(8)]


@dataclass
class Engine:
    """Host memory in pages: the first eight rows are filled."""

    server: ServerProcess
    client: CacheClient
    memory: bytearray
    jobs: PageJobs
    lookups: PageLookups

    def store(self) -> EndedJob:
        self.jobs.store(PageJob(1, "request", _KEYS, range(8)))
        return self._ended()

    def load(self) -> EndedJob:
        self.jobs.load(PageJob(2, "request", _KEYS, range(16, 24)))
        return self._ended()

    def find(self, owner: str = "request") -> list[bool | None]:
        self.answers(owner)
        self.lookups.send()
        wait_until(lambda: None not in self.answers(owner), "answers")
        return self.answers(owner)

    def answers(self, owner: str) -> list[bool | None]:
        return [self.lookups.find(key, owner) for key in _KEYS]

    def rows(self, first: int) -> bytes:
        return bytes(self.memory[first * _PAGE_BYTES : (first + 8) * _PAGE_BYTES])

    def _ended(self) -> EndedJob:
        self.jobs.drain()
        (ended,) = self.jobs.take_ended()
        return ended


@contextlib.contextmanager
def _engine(timeout_s: float) -> Iterator[Engine]:
    fields = NamespaceFields(layout=_LAYOUT, weights="tests")
    with (
        cache_server() as server,
        kvtier.connect(server.unix, layout=_LAYOUT, namespace=fields, timeout_s=timeout_s) as client,
    ):
        memory = bytearray(_PAGE_BYTES * _NUM_ROWS)
        for row in range(8):
            memory[row * _PAGE_BYTES : (row + 1) * _PAGE_BYTES] = bytes([row + 1]) * _PAGE_BYTES
        jobs = PageJobs(client, memoryview(memory), _PAGE_BYTES)
        lookups = PageLookups(client, max_held=lambda: _NUM_ROWS, patience_s=CALL_S)
        try:
            yield Engine(server, client, memory, jobs, lookups)
        finally:
            jobs.close()
            lookups.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with _engine(CALL_S) as engine:
        yield engine


@pytest.fixture
def impatient() -> Iterator[Engine]:
    with _engine(0.5) as engine:
        wait_until(lambda: engine.store().is_done, "pages stored")
        yield engine


def _num_leases(server: ServerProcess) -> object:
    with kvtier.connect(server.unix) as client:
        return client.stats()["leases"]


def test_pages_are_stored_found_leased_and_loaded(engine: Engine) -> None:
    assert engine.find("before") == [False] * 8
    assert engine.store().is_done
    assert engine.find() == [True] * 8
    assert _num_leases(engine.server) == 1

    assert engine.load().is_done
    engine.lookups.note_loaded("request", _KEYS, [])

    assert engine.rows(16) == engine.rows(0)
    wait_until(lambda: not _num_leases(engine.server), "leases given back")


def test_pages_that_are_dropped_before_they_are_loaded_are_missing_and_leave_the_memory_alone(engine: Engine) -> None:
    engine.store()
    engine.client.drop()

    ended = engine.load()

    assert not any(ended.is_there)
    assert engine.rows(16) == bytes(8 * _PAGE_BYTES)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_all_jobs_and_questions_end_without_the_server(impatient: Engine, number: signal.Signals) -> None:
    impatient.server.send_signal(number)
    wait_until(lambda: is_stopped(impatient.server.pid), "a server that says nothing more")

    ended = [impatient.load(), impatient.store()]

    assert [any(one.is_there) for one in ended] == [False, False]
    assert impatient.find() == [False] * 8
    assert impatient.rows(16) == bytes(8 * _PAGE_BYTES)


def test_pages_are_loaded_from_a_server_that_hung_and_goes_on(impatient: Engine) -> None:
    impatient.server.send_signal(signal.SIGSTOP)
    impatient.load()
    impatient.server.send_signal(signal.SIGCONT)

    wait_until(lambda: impatient.load().is_done, "a load")

    assert impatient.rows(16) == impatient.rows(0)
