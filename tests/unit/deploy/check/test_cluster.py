"""What `kvtier check` says of the nodes of a cluster, which are sockets of this test."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from kvtier.deploy.check.cluster import notes_on_cluster
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.slots import NUM_SLOTS

GOOD = {
    "maxmemory": "1000",
    "maxmemory-policy": "volatile-ttl",
    "cluster-require-full-coverage": "no",
    "io-threads": "1",
}


def mapped(values: dict[str, str]) -> bytes:
    words = b"".join(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for pair in values.items() for word in pair)
    return b"%%%d\r\n%b" % (len(values), words)


@contextlib.contextmanager
def node(server: str, version: str, settings: dict[str, str], num_slots: int = NUM_SLOTS) -> Iterator[ClusterConfig]:
    """One that has the first `num_slots`."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    while request := sock.recv(4096):
                        sock.sendall(reply_to(request))

    def reply_to(request: bytes) -> bytes:
        if b"SLOTS" in request:
            return b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (num_slots - 1, port)
        return mapped(settings) if b"CONFIG" in request else mapped({"server": server, "version": version})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield ClusterConfig(valkey=(f"tcp://127.0.0.1:{port}",))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def notes(server: str, version: str, settings: dict[str, str], num_slots: int = NUM_SLOTS) -> list[str]:
    with node(server, version, settings, num_slots) as config:
        return list(notes_on_cluster(config))


@pytest.mark.parametrize(("server", "version"), [("valkey", "9.0.1"), ("valkey", "10.1.0"), ("redis", "7.0.15")])
def test_nothing_is_said_of_a_cluster_that_is_set_up_for_blocks(server: str, version: str) -> None:
    assert notes(server, version, GOOD) == []


@pytest.mark.parametrize(
    ("version", "told"),
    [("7.2.5", "runs Valkey 7.2.5; 8.0 is the oldest"), ("8.1.3", "runs Valkey 8.1.3; 9 sends large values")],
)
def test_an_old_version_is_named(version: str, told: str) -> None:
    (note,) = notes("valkey", version, GOOD)

    assert told in note


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("maxmemory", "0", "maxmemory 0"),
        ("maxmemory-policy", "noeviction", "noeviction"),
        ("maxmemory-policy", "allkeys-lru", "allkeys-lru"),
        ("cluster-require-full-coverage", "yes", "one lost node stops all"),
        ("io-threads", str(max(2, os.cpu_count() or 1)), "as many as this host has cores"),
    ],
)
def test_a_setting_that_costs_blocks_is_named(setting: str, value: str, told: str) -> None:
    (note,) = notes("valkey", "9.1.0", {**GOOD, setting: value})

    assert told in note


def test_slots_without_a_node_are_counted() -> None:
    (note,) = notes("valkey", "9.1.0", GOOD, num_slots=NUM_SLOTS - 100)

    assert "100 of its slots have no node" in note
