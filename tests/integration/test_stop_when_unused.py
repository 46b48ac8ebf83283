"""`kvtier cache-server --stop-when-unused`: the server stops in good order once no client is connected any more."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.actors import actor, chain, open_client, payloads, read_all, stays
from tests.support.waiting import LIMIT_S, wait_until

HASHES = chain(1, 8)


def _has_ended(server: ServerProcess) -> bool:
    return server.process.poll() is not None


def test_a_server_that_nobody_comes_to_ends_by_itself() -> None:
    with cache_server("--stop-when-unused", "3") as server:
        assert stays(lambda: not _has_ended(server), 0.7)
        wait_until(lambda: _has_ended(server))
        assert server.process.returncode == 0
        assert list(server.folder.iterdir()) == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_client_keeps_it_however_idle_and_its_leaving_starts_the_clock_anew(transport: str) -> None:
    with cache_server("--stop-when-unused", "3", tcp=True) as server:
        for _ in range(2):
            with open_client(getattr(server, transport), server.token) as client:
                client.ping()
                assert stays(lambda: not _has_ended(server), 4)
            assert stays(lambda: not _has_ended(server), 0.4)
        wait_until(lambda: _has_ended(server))
        assert server.process.returncode == 0


@pytest.mark.slow
def test_one_of_several_clients_is_enough_to_keep_it() -> None:
    with cache_server("--stop-when-unused", "3") as server, open_client(server.unix) as client:
        client.ping()
        with open_client(server.unix) as other:
            other.ping()
        assert stays(lambda: not _has_ended(server), 4)
        client.ping()


@pytest.mark.slow
def test_a_killed_client_has_gone_too_whatever_it_held() -> None:
    with cache_server("--stop-when-unused", "4") as server:
        with open_client(server.unix) as client:
            client.set(HASHES, payloads(HASHES))
        with actor("hold", address=server.unix, leased_seed=1, reserved_seed=2, num_blocks=8) as holder:
            holder.hear()
            assert stays(lambda: not _has_ended(server), 5)
        wait_until(lambda: _has_ended(server))
        assert server.process.returncode == 0


def test_what_it_held_is_on_disk_when_it_has_ended(tmp_path: Path) -> None:
    options = ("--stop-when-unused", "2", "--folder", str(tmp_path / "data"), "--disk", "32MiB")
    with cache_server(*options) as server:
        with open_client(server.unix) as client:
            client.set(HASHES, payloads(HASHES))
        wait_until(lambda: _has_ended(server))
        assert server.process.returncode == 0

    with cache_server(*options) as server, open_client(server.unix) as client:
        assert read_all(client, HASHES) == payloads(HASHES)


def test_signals_still_end_it_at_once() -> None:
    with cache_server("--stop-when-unused", "60") as server:
        server.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_only_a_time_is_taken(seconds: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kvtier", "cache-server", "--stop-when-unused", seconds],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert f"'{seconds}' is not a number of seconds above 0" in ended.stderr
