"""Hosts in namespaces: who reaches whom, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.namespaces import Host, Network, network
from tests.support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.slow  # each starts a few dozen processes of `ip`

_PORT = 4000
_SILENCE_S = 0.2


@pytest.fixture
def joined() -> Iterator[Network]:
    with network(3) as made:
        yield made


def reaches(one: Host, other: Host, timeout_s: float = _SILENCE_S) -> bool:
    with other.entered(), socket.create_server((other.address, _PORT)):
        with one.entered():
            try:
                socket.create_connection((other.address, _PORT), timeout_s).close()
            except OSError:
                return False
            return True


def own_address() -> str:
    return subprocess.run(["ip", "-4", "addr", "show", "eth0"], capture_output=True, text=True).stdout


def test_all_hosts_reach_each_other_and_nobody_else(joined: Network) -> None:
    one, other, last = joined.hosts
    assert all(reaches(*pair, timeout_s=LIMIT_S) for pair in ((one, other), (other, last), (last, one)))
    with one.entered():
        assert own_address().count("10.0.0.1/24") == 1
    assert "10.0.0.1/24" not in own_address(), "this thread is back"


@pytest.mark.parametrize("way", ["unplugged", "down", "dropped"])
def test_a_link_is_cut_and_healed(joined: Network, way: str) -> None:
    one, other, last = joined.hosts
    cut, heal = {
        "unplugged": (lambda: joined.unplug(one), lambda: joined.plug_in_again(one)),
        "down": (lambda: joined.take_down(one), lambda: joined.take_up(one)),
        "dropped": (lambda: joined.drop_between(one, [other]), lambda: joined.pass_between(one, [other])),
    }[way]
    assert reaches(one, other, LIMIT_S)

    cut()

    assert not reaches(one, other)
    assert reaches(other, last, LIMIT_S)
    assert way != "dropped" or reaches(last, one, LIMIT_S), "only two hosts do not hear each other"
    heal()
    wait_until(lambda: reaches(one, other, LIMIT_S))
    wait_until(lambda: reaches(other, one, LIMIT_S))


def test_what_runs_on_a_host_ends_with_the_network() -> None:
    with network(1) as joined:
        (host,) = joined.hosts
        with host.entered():
            process = subprocess.Popen(["sleep", str(LIMIT_S)])
        assert host.processes() == [process.pid]
    assert process.wait(LIMIT_S) < 0


def test_a_host_is_left_when_what_was_done_there_fails(joined: Network) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with contextlib.suppress(ZeroDivisionError), joined.hosts[0].entered():
        assert os.readlink("/proc/thread-self/ns/net") != before
        raise ZeroDivisionError

    assert os.readlink("/proc/thread-self/ns/net") == before
