"""Which nodes of a cluster are down, and how they are found again. The nodes are sockets of this test."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

import kvtier.stores.valkey.cluster
from kvtier.errors import TierTimeout
from kvtier.stores.valkey.cluster import Cluster, NodeShare
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, NodeConnection
from kvtier.stores.valkey.shard import Shard
from kvtier.stores.valkey.slots import NUM_SLOTS
from tests.support.waiting import CALL_S, FOR_EVER_S, LIMIT_S, wait_until

NUM_NODES = 3


def port_of(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def slots_reply(ports: Sequence[int], num_slots: int) -> bytes:
    parts = [b"*%d\r\n" % len(ports)]
    for number, port in enumerate(ports):
        first, end = number * num_slots // len(ports), (number + 1) * num_slots // len(ports)
        parts.append(b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, end - 1, port))
    return b"".join(parts)


@contextlib.contextmanager
def seed_that_names(ports: Sequence[int], num_slots: int = NUM_SLOTS) -> Iterator[NodeAddress]:
    """A node without slots, which says who has the first `num_slots` of them."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    while request := sock.recv(4096):
                        sock.sendall(slots_reply(ports, num_slots) if b"SLOTS" in request else b"+OK\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield NodeAddress("127.0.0.1", port_of(listener))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def answer_together(listeners: Sequence[socket.socket]) -> None:
    """Answer nobody until all nodes are asked at the same time."""
    while True:
        with contextlib.ExitStack() as stack:
            asking = [stack.enter_context(listener.accept()[0]) for listener in listeners]
            for sock in asking:
                sock.recv(4096)
            if all(is_open(sock) for sock in asking):
                for sock in asking:
                    sock.sendall(b"+OK\r\n")
                return


def is_open(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True


def nothing(node: NodeConnection, share: NodeShare) -> None:
    raise AssertionError("nobody answers")


def test_nodes_that_are_down_are_looked_for_at_the_same_time() -> None:
    """One after the other, many silent ones would keep a node waiting that is back, and the end of the cluster."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(NUM_NODES)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))  # and does not listen
        seed = stack.enter_context(seed_that_names([port_of(listener) for listener in listeners]))
        cluster = stack.enter_context(contextlib.closing(Cluster([seed], NodeAccess())))
        assert cluster.wait_until_known(LIMIT_S)
        every_node = [number * NUM_SLOTS // NUM_NODES for number in range(NUM_NODES)]
        failures = cluster.spread(every_node, nothing, time.monotonic() + CALL_S, split_above=NUM_NODES)
        assert (len(failures), cluster.num_down) == (NUM_NODES, NUM_NODES)
        for listener in listeners:
            listener.listen()
            listener.settimeout(LIMIT_S)

        answer_together(listeners)

        wait_until(lambda: cluster.num_down == 0)


@pytest.mark.parametrize("num_known", [0, NUM_SLOTS // 2])
def test_a_node_that_has_forgotten_the_cluster_is_not_believed(num_known: int) -> None:
    """One that was restarted without its `nodes.conf` would make all blocks misses."""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(seed_that_names([]))
        forgetful = stack.enter_context(seed_that_names([node.port] if num_known else [], num_known))
        seed = stack.enter_context(seed_that_names([node.port]))
        cluster = stack.enter_context(contextlib.closing(Cluster([forgetful, seed], NodeAccess())))
        assert cluster.wait_until_known(LIMIT_S)
        asked: list[int] = []

        def note(connection: NodeConnection, share: NodeShare) -> None:
            asked.extend(share.positions)

        deadline = time.monotonic() + CALL_S
        assert cluster.spread([0, NUM_SLOTS - 1], note, deadline, split_above=NUM_NODES) == []
        assert sorted(asked) == [0, 1]


def test_slots_without_a_node_are_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.stores.valkey.cluster, "_REFRESH_S", FOR_EVER_S)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(seed_that_names([]))
        seed = stack.enter_context(seed_that_names([node.port], NUM_SLOTS // 2))
        cluster = stack.enter_context(contextlib.closing(Cluster([seed], NodeAccess())))
        assert cluster.wait_until_known(LIMIT_S)
        before = cluster.num_refreshes

        def is_asked_again() -> bool:
            deadline = time.monotonic() + CALL_S
            assert cluster.spread([0, NUM_SLOTS - 1], lambda *_: None, deadline, split_above=NUM_NODES) == []
            return cluster.num_refreshes > before

        wait_until(is_asked_again)


def test_a_node_that_nobody_had_time_to_ask_is_not_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with contextlib.closing(Shard(NodeAddress("127.0.0.1", port_of(listener)), NodeAccess())) as shard:
            with pytest.raises(TierTimeout, match="no time was left"), shard.connection(time.monotonic() - 1):
                raise AssertionError("it is too late")

            assert not shard.is_down
