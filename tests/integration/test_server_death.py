"""A server that dies, hangs or comes back: callers get less, never an exception, and never wait past their deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import kvtier
from kvtier.blocks.match_end import MatchEnd
from kvtier.client.client import CacheClient
from kvtier.errors import TierError, TierUnavailable
from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.actors import (
    LAYOUT,
    NAMESPACE,
    NOTHING_HELD,
    chain,
    empty_buffers,
    held,
    hung,
    open_client,
    payloads,
    read_all,
    restarted,
)
from tests.support.waiting import CALL_S, FOR_EVER_S, LIMIT_S, wait_until

pytestmark = pytest.mark.usefixtures("quiet_log")

_HASHES = chain(1, 12)
_PROMPTS = [chain(seed, 12) for seed in range(12)]


NUM_CALLS_TO_WAIT_FOR = 20
"""If each of them waited for its deadline, the test would exceed its time limit."""


@pytest.fixture
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    """Captured records keep errors, these their frames, and those what lay in them: a lease on a dead arena, say."""
    caplog.set_level(logging.CRITICAL, logger="kvtier")


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def _served(transport: str, timeout_s: float = CALL_S) -> Iterator[tuple[ServerProcess, CacheClient]]:
    """A server that has `_HASHES`, and a client of it."""
    with (
        cache_server(tcp=True) as server,
        open_client(getattr(server, transport), server.token, timeout_s) as client,
    ):
        client.set(_HASHES, payloads(_HASHES))
        yield server, client


def test_a_killed_server_is_a_miss_that_is_counted_and_costs_no_time(transport: str) -> None:
    with _served(transport) as (server, client):
        server.kill()

        lease = client.match(_HASHES)
        assert (lease.num_blocks, lease.ended) == (0, MatchEnd.TIER_DOWN)
        assert client.get(_HASHES, empty_buffers(12)) == 0
        assert list(client.stream_get(_HASHES)) == []
        assert client.set(_HASHES, payloads(_HASHES)) == 0
        assert client.contains(_HASHES) == [False] * 12
        assert not client.is_up
        assert client.metrics.value(client.metrics.failures, tier=getattr(server, transport)) >= 5
        assert client.metrics.value(client.metrics.missed_blocks) >= 24
        for _ in range(NUM_CALLS_TO_WAIT_FOR):
            client.match(_HASHES)
            client.set(_HASHES, payloads(_HASHES))


def test_what_an_operator_asks_of_a_killed_server_raises(transport: str) -> None:
    with _served(transport) as (server, client):
        server.kill()
        for ask in (client.stats, client.info, client.drop, lambda: client.pin(_HASHES)):
            with pytest.raises(TierError):
                ask()


def test_a_client_comes_back_by_itself_when_its_server_is_started_again(transport: str) -> None:
    with _served(transport) as (server, client):
        server.kill()
        assert client.get(_HASHES, empty_buffers(12)) == 0
        with restarted(server):
            wait_until(lambda: client.is_up)
            assert client.get(_HASHES, empty_buffers(12)) == 0, "another server's memory is empty"
            assert client.set(_HASHES, payloads(_HASHES)) == 12
            assert read_all(client, _HASHES) == payloads(_HASHES)


def test_a_lease_on_a_dead_servers_memory_can_be_read_until_it_is_released() -> None:
    with _served("unix") as (server, client):
        lease = client.match(_HASHES)
        server.kill()
        assert [bytes(view) for view in lease.views()] == payloads(_HASHES)
        with restarted(server):
            wait_until(lambda: client.is_up)
            other = chain(2, 12)
            client.set(other, payloads(other))

            assert [bytes(view) for view in lease.views()] == payloads(_HASHES)
            lease.release()
            assert read_all(client, other) == payloads(other)
            wait_until(lambda: held(client) == NOTHING_HELD)


def test_a_reservation_on_a_dead_server_commits_nothing_on_the_next_one() -> None:
    with _served("unix") as (server, client):
        reservation = client.reserve(chain(2, 4))
        server.kill()
        client.contains(_HASHES)
        with restarted(server):
            wait_until(lambda: client.is_up)
            with client.reserve(chain(3, 4)):
                with pytest.raises(TierError):
                    reservation.commit()
                reservation.close()
                assert held(client)[1] == 1
            assert not any(client.contains(chain(2, 4) + chain(3, 4)))


def test_a_dead_servers_memory_goes_when_its_clients_have_met_the_next_server() -> None:
    with _served("unix") as (server, client):
        num_before = _num_arenas_open()
        server.kill()
        assert client.get(_HASHES, empty_buffers(12)) == 0
        with restarted(server):
            wait_until(lambda: client.is_up)
            assert client.set(_HASHES, payloads(_HASHES)) == 12
            assert _num_arenas_open() == num_before


def test_calls_to_a_hung_server_return_within_their_deadline(transport: str) -> None:
    with _served(transport) as (server, client):
        calls: list[Callable[[], object]] = [
            lambda: client.match(_HASHES, timeout_s=0.4).num_blocks,
            lambda: client.get(_HASHES, empty_buffers(12), timeout_s=0.4),
            lambda: client.set(chain(2, 4), payloads(chain(2, 4)), timeout_s=0.4),
            lambda: any(client.contains(_HASHES, timeout_s=0.4)),
        ]
        with hung(server):
            for call in calls:
                assert not call()
            assert client.metrics.value(client.metrics.failures) >= len(calls)
            wait_until(lambda: not client.is_up)
            for _ in range(NUM_CALLS_TO_WAIT_FOR):
                client.match(_HASHES)  # the breaker is open by now
            assert client.metrics.value(client.metrics.failures, kind="timeout") >= 1

        wait_until(lambda: client.is_up)
        assert read_all(client, _HASHES) == payloads(_HASHES)
        wait_until(lambda: held(client) == NOTHING_HELD)  # leases whose grant nobody read, too


def test_a_shorter_deadline_than_the_calls_before_is_kept() -> None:
    with _served("unix", timeout_s=FOR_EVER_S) as (server, client):
        client.contains(_HASHES)
        with hung(server):
            assert client.contains(_HASHES, timeout_s=0.1) == [False] * 12


def test_closing_a_client_of_a_hung_server_does_not_hang(transport: str) -> None:
    with cache_server(tcp=True) as server:
        client = open_client(getattr(server, transport), server.token, 0.3)
        with hung(server):
            client.match(_HASHES)
            client.close()


def test_a_server_that_is_not_there_yet_is_used_once_it_is(transport: str) -> None:
    with cache_server(tcp=True) as server:
        server.kill()
        with kvtier.connect(
            getattr(server, transport),
            token=server.token,
            layout=LAYOUT,
            namespace=NAMESPACE,
            must_answer=False,
            timeout_s=CALL_S,
        ) as client:
            assert client.match(_HASHES).num_blocks == 0
            with restarted(server):
                wait_until(lambda: client.is_up)
                assert client.set(_HASHES, payloads(_HASHES)) == 12


@pytest.mark.sampled(every=2)
def test_a_server_killed_under_load_is_no_error_and_is_used_again(transport: str) -> None:
    with cache_server(tcp=True) as server, open_client(getattr(server, transport), server.token) as client:
        with _Load(client, _PROMPTS) as load:
            load.go_on_for(30)
            server.kill()
            load.go_on_for(60)
            with restarted(server):
                read_before = load.num_read
                wait_until(lambda: load.num_read > read_before + 12)
                load.end()

        assert load.errors == []
        assert load.num_wrong == 0


class _Load:
    """Threads that read every prompt whole, by turns with get, match and stream_get, and set it again."""

    def __init__(self, client: CacheClient, prompts: list[list[kvtier.BlockHash]]) -> None:
        self._client = client
        self._prompts = prompts
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(turn,)) for turn in range(3)]
        self.rounds = [0, 0, 0]
        self.num_read = 0
        self.num_wrong = 0
        self.errors: list[Exception] = []

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def go_on_for(self, rounds: int) -> None:
        """Until every thread has done `rounds` more, or has failed."""
        targets = [done + rounds for done in self.rounds]
        wait_until(
            lambda: self.errors or all(done >= target for done, target in zip(self.rounds, targets, strict=True))
        )

    def _run(self, turn: int) -> None:
        try:
            while not self._is_over.is_set():
                prompt = self._prompts[(self.rounds[turn] + 4 * turn) % len(self._prompts)]
                read = (self._get, self._match, self._stream)[self.rounds[turn] % 3](prompt)
                self.num_read += len(read)
                self.num_wrong += read != payloads(prompt)[: len(read)]
                self._client.set(prompt, payloads(prompt))
                self.rounds[turn] += 1
        except Exception as error:
            self.errors.append(error)

    def _get(self, prompt: list[kvtier.BlockHash]) -> list[bytes]:
        return read_all(self._client, prompt)

    def _match(self, prompt: list[kvtier.BlockHash]) -> list[bytes]:
        into = empty_buffers(len(prompt))
        with self._client.match(prompt) as lease:
            if lease.has_views:
                return [bytes(view) for view in lease.views()]
            return [bytes(buffer) for buffer in into[: lease.fetch(into)]]

    def _stream(self, prompt: list[kvtier.BlockHash]) -> list[bytes]:
        return [bytes(view) for _, view in self._client.stream_get(prompt)]


def _num_arenas_open() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("kvtier-arena" in os.readlink(link) for link in links if os.path.lexists(link))


def test_a_flush_that_waits_for_deferred_work_ends_when_the_server_dies() -> None:
    """At once, not at its deadline of a minute."""
    ended: list[Exception] = []
    with _served("unix") as (server, client):

        def flush() -> None:
            try:
                client.flush()
            except TierError as error:
                ended.append(error)

        thread = threading.Thread(target=flush)
        with hung(server):
            client._endpoint.background.do_later(client.ping)  # stuck, as a deferred commit would be
            thread.start()
            time.sleep(0.3)
            server.kill()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "it waits for a server that is gone"
        assert isinstance(ended[0], TierUnavailable)
