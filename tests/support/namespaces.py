"""Hosts on one machine: network namespaces that a bridge joins, whose links are cut and healed. Needs root and `ip`.

The namespaces have no names. The kernel takes one away, with its links, when the last process and descriptor in it are
gone, so that nothing stays behind, however a test ends. A thread that has entered a host is there alone: what it opens,
and the threads and processes that it starts, are on that host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

_CLONE_NEWNET = 0x40000000
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
_NOBODY = "02:00:00:00:00:01"
"""A hardware address without a host: packets to it are silently dropped."""
_END_S = 60.0
_ENDED = ("Z", "X")
"""States of a process that has ended: its parent may not have looked yet."""
_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    """One namespace with its own loopback and, unless it is the switch, a link `eth0`."""

    def __init__(self, name: str, address: str = "") -> None:
        """Raises `OSError` where namespaces cannot be made."""
        self.name = name
        self.address = address
        self._descriptor = _new_namespace()
        self._inode = os.fstat(self._descriptor).st_ino
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """Its name for `ip`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is on the host meanwhile."""
        before = os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._descriptor)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def ip(self, *orders: str) -> None:
        """Orders for `ip`, without its name. Raises `RuntimeError` with what it says."""
        with self.entered():
            done = subprocess.run(["ip", "-batch", "-"], input="\n".join(orders), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip on {self.name}: {done.stderr.strip()}")

    def processes(self) -> list[int]:
        """All that run on it, but this one, whose threads only visit."""
        return [pid for pid in _all_processes() if pid != os.getpid() and self._has(pid)]

    def close(self) -> None:
        os.close(self._descriptor)

    def _has(self, pid: int) -> bool:
        try:
            is_here = os.stat(f"/proc/{pid}/ns/net").st_ino == self._inode
        except OSError:
            return False
        return is_here and _state_of(pid) not in _ENDED


class Network:
    """Hosts with the addresses 10.0.0.1 and on, all joined by one bridge."""

    def __init__(self, num_hosts: int) -> None:
        self.hosts: list[Host] = []
        self._switch = Host("switch")
        try:
            self._switch.ip("link add joined type bridge forward_delay 0", "link set joined up")
            for number in range(1, num_hosts + 1):
                self.hosts.append(Host(f"host{number}", f"10.0.0.{number}"))
                self._plug_in(self.hosts[-1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends what runs on its hosts."""
        self.end_processes()
        for host in (*self.hosts, self._switch):
            host.close()

    def end_processes(self) -> None:
        """Stop its processes with a signal, so that parents end their children; kill those that remain."""
        running = self._processes()
        _signal([pid for pid in running if _parent_of(pid) not in running], signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self._processes(), limit_s=_END_S)
        while running := self._processes():
            _signal(running, signal.SIGKILL)

    def unplug(self, host: Host) -> None:
        """Its cable: nothing comes or goes, and nobody tells it."""
        self._switch.ip(f"link set {host.name} down")

    def plug_in_again(self, host: Host) -> None:
        self._switch.ip(f"link set {host.name} up")

    def take_down(self, host: Host) -> None:
        """Its link: the host knows that it has no network."""
        host.ip("link set eth0 down")

    def take_up(self, host: Host) -> None:
        host.ip("link set eth0 up")

    def drop_between(self, host: Host, others: Sequence[Host]) -> None:
        """Packets between the host and each of the others, silently, both ways."""
        for one, other in _both_ways(host, others):
            one.ip(f"neigh replace {other.address} lladdr {_NOBODY} dev eth0 nud permanent")

    def pass_between(self, host: Host, others: Sequence[Host]) -> None:
        """Undo `drop_between`."""
        for one, other in _both_ways(host, others):
            one.ip(f"neigh del {other.address} dev eth0")

    def _processes(self) -> list[int]:
        return [pid for host in self.hosts for pid in host.processes()]

    def _plug_in(self, host: Host) -> None:
        self._switch.ip(
            f"link add {host.name} type veth peer name eth0 netns {host.path}",
            f"link set {host.name} master joined up",
        )
        host.ip(f"addr add {host.address}/24 dev eth0", "link set eth0 up")


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Skips the test where there can be none."""
    if (reason := _why_not()) is not None:
        pytest.skip(reason)
    with contextlib.closing(Network(num_hosts)) as joined:
        yield joined


@functools.cache
def _why_not() -> str | None:
    """The reason why this process cannot make networks."""
    if shutil.which("ip") is None:
        return "there is no `ip` on this machine"
    try:
        with contextlib.closing(Host("trial")) as trial:
            trial.ip("link add one type bridge", "link add two type veth peer name three")
    except OSError as error:
        return f"network namespaces cannot be made here: {error.strerror}"
    except RuntimeError as error:
        return f"network namespaces cannot be joined here: {error}"
    return None


def _both_ways(host: Host, others: Sequence[Host]) -> list[tuple[Host, Host]]:
    return [pair for other in others for pair in ((host, other), (other, host))]


def _new_namespace() -> int:
    """Its descriptor. A thread of its own makes it, and ends: no other thread ever leaves its namespace for it."""
    made: list[int] = []
    failed: list[int] = []

    def make() -> None:
        if _libc.unshare(_CLONE_NEWNET):
            failed.append(ctypes.get_errno())
        else:
            made.append(os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))
    return made[0]


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _state_of(pid: int) -> str:
    """One letter, as `ps` has it."""
    return _status(pid)[0]


def _parent_of(pid: int) -> int:
    return int(_status(pid)[1])


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
